"""Recordings: what came to the scheduler, what it decided and when, without a word of any text.

A recording is a file of JSON lines, one per event; each names its kind under ``e``. Together with
the configuration in its first line, a scheduler can be led through the same life again
(``layby replay --check``), and the arrivals are a trace (``layby simulate --trace``).

| kind    | what happened                                                                     |
|---------|-----------------------------------------------------------------------------------|
| `head`  | a file begins                                                                     |
| `state` | the engine is idle, and this is what its block pools look like                    |
| `gap`   | the file goes on where the one before it ended, in the middle of the work         |
| `in`    | a request came, and was queued or refused                                         |
| `run`   | steps in a row in which running requests decoded, and nothing was decided         |
| `step`  | any other step was decided                                                        |
| `done`  | the outcome of the step decided last, unless a `run` says that it had none        |
| `cut`   | a stop string ended a sample                                                      |
| `abort` | a request was aborted or failed                                                   |
| `class` | a request was put into another class                                              |
| `size`  | the device pool is to have another size                                           |
| `moved` | transfers of parked work between RAM and disk have ended                          |
| `lost`  | a parked request's KV was lost                                                    |
| `cost`  | what parking and computing cost, as measured: victims leave by it                 |
| `hash`  | content of blocks that samples have filled; stands before what depends on it      |
| `broken`| the scheduler raised an error; what follows proves nothing                        |
| `close` | the engine was closed in good order                                               |

The dataclasses below say what each line holds; a field at its default is left out. What the engine
turns away to shed load never comes to the scheduler, and so is not recorded.

**What is protected.** There is no text, no token id, no name of a request or user and no address.
Block contents appear as hashes of 48 bits under a key of 256 random bits, which is made anew for
each process and never written: contents can be neither guessed at nor compared with those of
another recording. **What is not:** when requests came, how long they and their answers were, their
classes, and which of the recording's prompts begin alike.

**Rotation.** A file that has reached its size gives way at the next idle moment: it becomes
``FILE.1``, ``FILE.1`` becomes ``FILE.2`` and so on, and the new one begins with a ``state``, so
that it can be replayed alone. An engine that is never idle goes on until twice the size; the new
file then begins with a ``gap``, and what follows can only be checked together with the file before
it, until there is an idle moment, at which a ``state`` is written. What another process left under
the name is moved out of the way likewise. A name to which another engine records is left alone: the
recording is refused at its start, or ends when it would give way.
"""

from layby.engine.recording.events import (
    FORMAT,
    Abort,
    Arrival,
    Broken,
    Close,
    Costs,
    Cut,
    Done,
    Event,
    Gap,
    Hashes,
    Head,
    Lost,
    Moved,
    Reclassed,
    Resize,
    Run,
    State,
    Step,
    event_line,
    parse_event,
)
from layby.engine.recording.file import KEPT_FILES, RecordingFile, check_recordable
from layby.engine.recording.numbers import TimeCode, bounded, pack_hashes, unpack_hashes
from layby.engine.recording.plans import PlanDigest, ending, is_steady, step_event

__all__ = [
    "FORMAT",
    "KEPT_FILES",
    "Abort",
    "Arrival",
    "Broken",
    "Close",
    "Costs",
    "Cut",
    "Done",
    "Event",
    "Gap",
    "Hashes",
    "Head",
    "Lost",
    "Moved",
    "PlanDigest",
    "Reclassed",
    "RecordingFile",
    "Resize",
    "Run",
    "State",
    "Step",
    "TimeCode",
    "bounded",
    "check_recordable",
    "ending",
    "event_line",
    "is_steady",
    "pack_hashes",
    "parse_event",
    "step_event",
    "unpack_hashes",
]
