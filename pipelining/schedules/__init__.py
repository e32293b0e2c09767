"""The schedules, one file each, and the protocol by which users add their own.

In come numbers of ranks and micro-batches, out goes an ``Order`` (pipelining/actions.py). This file
only re-exports.
"""

from stagewright.pipelining.schedules.gpipe import GPipe as GPipe
from stagewright.pipelining.schedules.interleaved import Interleaved1F1B as Interleaved1F1B
from stagewright.pipelining.schedules.names import by_name as by_name
from stagewright.pipelining.schedules.one_f_one_b import OneFOneB as OneFOneB
from stagewright.pipelining.schedules.schedule import Schedule as Schedule
from stagewright.pipelining.schedules.zbh1 import ZBH1 as ZBH1
