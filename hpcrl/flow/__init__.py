"""Decisions only (machine.py), in the words of words.py."""

from hpcrl.flow.machine import CLAIM_S as CLAIM_S
from hpcrl.flow.machine import MAX_LOAD_FAILURES as MAX_LOAD_FAILURES
from hpcrl.flow.machine import Flow as Flow
from hpcrl.flow.scaling import Scaling as Scaling
from hpcrl.flow.words import *  # noqa: F403 (all of them are the public words)
