"""What a command is at is shown on a terminal, and nowhere else."""

import io

from decaylab.cli.progress import stages


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_stages_are_for_terminals():
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        with stages(stream) as tell:
            tell("judging E5")
        assert ("judging E5" in stream.getvalue()) == shown
