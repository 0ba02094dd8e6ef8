"""A child ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

CHILD = """
import sys, time
from hsjournal.lifeline import end_with_parent
end_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""

PARENT = """
import os, subprocess, sys, threading, time
read_end, write_end = os.pipe()
how = sys.argv[1]
fd = read_end if how != "signal" else -1
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(fd)], stdout=subprocess.PIPE,
                             pass_fds=() if fd < 0 else (fd,), start_new_session=True)
    child.stdout.readline()
start()
print(child.pid, flush=True)
sys.stdin.readline()
if how == "pipe":
    os.close(write_end)
    time.sleep(60)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["exit", "kill", "pipe", "signal"])
def test_a_child_dies_with_its_parent(how):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), how, CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    if how == "kill":
        parent.send_signal(signal.SIGKILL)
    else:
        parent.stdin.write("\n")
        parent.stdin.flush()
    gone, _ = psutil.wait_procs([child], timeout=5)
    assert gone or child.status() == psutil.STATUS_ZOMBIE
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()


def test_it_also_dies_when_the_parent_was_gone_before_it_could_ask():
    """The kernel's signal comes too late then; the end of the pipe does not."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(read_end)],
        check=False,
        pass_fds=(read_end,),
        timeout=20,
        stdout=subprocess.PIPE,
    )
    os.close(read_end)
    assert done.returncode == -signal.SIGKILL


def test_another_signal_can_be_asked_for():
    read_end, write_end = os.pipe()
    code = CHILD.replace("int(sys.argv[1]))", "int(sys.argv[1]), 15)")
    child = subprocess.Popen([sys.executable, "-c", code, str(read_end)], pass_fds=(read_end,), stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.close(write_end)
    assert child.wait(5) == -signal.SIGTERM
    child.stdout.close()
    os.close(read_end)
