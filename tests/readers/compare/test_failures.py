"""What a dead or failing worker means, in one line."""

from __future__ import annotations

import pytest

from readers.compare.failures import explain
from readers.errors import RecordCorruptError


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible ...", "--shm-size"),
        ("unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)", "--shm-size"),
        ("unable to mmap 602 bytes from file </torch_7>: Cannot allocate memory (12)", "--shm-size"),
        ("received 0 items of ancdata", "ulimit -n"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "fewer --num-workers"),
        ("DataLoader worker (pid(s) 7) exited unexpectedly", "--num-workers 0"),
    ],
)
def test_a_dead_worker_comes_with_a_hint(message: str, hint: str) -> None:
    """Case 36 and its neighbours; the message itself is kept."""
    said = explain(RuntimeError(message))
    assert hint in said
    assert message.strip() in said
    assert "\n" not in said


def test_a_record_error_from_a_worker_loses_its_traceback() -> None:
    text = (
        "Caught RecordCorruptError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\nreaders.errors.RecordCorruptError: record 3 is bad. Copy it\nsample index 3\n'
    )
    assert explain(RecordCorruptError(text)) == "record 3 is bad. Copy it"
