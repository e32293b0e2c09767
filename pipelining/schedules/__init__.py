"""The schedules, one file each, and the protocol by which users add their own.

In come numbers of ranks and micro-batches, out goes an ``Order`` (pipelining/actions.py). This file
only re-exports.
"""

from stagewright.pipelining.schedules.auto import Auto as Auto
from stagewright.pipelining.schedules.bfs import LoopedBFS as LoopedBFS
from stagewright.pipelining.schedules.dfs import LoopedDFS as LoopedDFS
from stagewright.pipelining.schedules.dualpipev import DualPipeV as DualPipeV
from stagewright.pipelining.schedules.eager import Eager1F1B as Eager1F1B
from stagewright.pipelining.schedules.generated import GeneratedSchedule as GeneratedSchedule
from stagewright.pipelining.schedules.gpipe import GPipe as GPipe
from stagewright.pipelining.schedules.grid import GridSchedule as GridSchedule
from stagewright.pipelining.schedules.hanayo import HanayoWaves as HanayoWaves
from stagewright.pipelining.schedules.interleaved import Interleaved1F1B as Interleaved1F1B
from stagewright.pipelining.schedules.names import by_name as by_name
from stagewright.pipelining.schedules.one_f_one_b import OneFOneB as OneFOneB
from stagewright.pipelining.schedules.schedule import Schedule as Schedule
from stagewright.pipelining.schedules.vhalf import VHalf as VHalf
from stagewright.pipelining.schedules.vmin import VMin as VMin
from stagewright.pipelining.schedules.zbh1 import ZBH1 as ZBH1
from stagewright.pipelining.schedules.zbh2 import ZBH2 as ZBH2
from stagewright.pipelining.schedules.zbv import ZBV as ZBV
