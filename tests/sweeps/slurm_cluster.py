"""A Slurm cluster of one node with two processors, for the time of a test."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

CONFIGURATION = """\
ClusterName=decaylab
SlurmctldHost={host}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=2
MessageTimeout=30
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
NodeName={host} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_there():
    """Whether Slurm is installed and this user may run it."""
    return os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "sbatch")))


@contextmanager
def cluster(folder):
    """Start a controller and a node; stopped at the end, with their jobs."""
    for attempt in range(3):  # a port that was free may be another's a moment later
        environment, daemons = _started(folder / str(attempt))
        if environment is not None:
            break
        _end(daemons)
    else:
        raise RuntimeError((folder / "2/slurmctld.log").read_text()[-2000:])
    try:
        yield environment
    finally:
        subprocess.run(["scancel", "--full", "-u", "root"], env=environment, capture_output=True)
        _end(daemons)


def _started(folder):
    """The environment for commands of Slurm, None if the node does not come up; the daemons."""
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    host = socket.gethostname().split(".")[0]
    with socket.socket() as one, socket.socket() as two:
        one.bind(("", 0))
        two.bind(("", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(host=host, ports=ports, folder=folder))
    environment = os.environ | {"SLURM_CONF": str(path)}
    daemons = []
    for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
        with (folder / f"{words[0]}.log").open("wb") as log:
            daemons.append(
                subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and all(daemon.poll() is None for daemon in daemons):
        words = ["sinfo", "-h", "-o", "%T"]
        sinfo = subprocess.run(words, env=environment, capture_output=True, text=True)
        if sinfo.stdout.strip() == "idle":
            return environment, daemons
        time.sleep(0.1)
    return None, daemons


def _end(daemons):
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:  # it waits for a job that does not end
            daemon.kill()
            daemon.wait()
