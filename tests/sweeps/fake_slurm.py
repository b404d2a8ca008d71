"""Commands of Slurm for machines without it: they answer with what a test gives them."""

import os
import stat


def install(folder, monkeypatch, **answers):
    """Put commands on the path: name -> (exit code, stdout, stderr)."""
    folder.mkdir(exist_ok=True)
    for name, (code, out, err) in answers.items():
        path = folder / name
        (folder / f"{name}.stdout").write_text(out)
        (folder / f"{name}.stderr").write_text(err)
        path.write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/{name}.calls\n'
            f"cat {folder}/{name}.stdout\ncat {folder}/{name}.stderr >&2\nexit {code}\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def calls(folder, name):
    """What a command was called with."""
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []
