"""Rows of files become token batches: prompts, supervised examples, preference pairs, pretraining text.

Which rows a step takes is a pure function of (seed, step), so nothing here needs saving or talks to other ranks.
Imports config and batch only; models, engines and rewards are elsewhere.
"""

from rlhf_mc.data.encode import Encoder, check_same_vocabulary, load_tokenizer
from rlhf_mc.data.examples import PreferencePairs, PretrainText, SupervisedExamples
from rlhf_mc.data.order import Order
from rlhf_mc.data.prompts import PromptSource
from rlhf_mc.data.report import DropReport
from rlhf_mc.data.rows import DataError, Row, read_rows

__all__ = [
    "DataError",
    "DropReport",
    "Encoder",
    "Order",
    "PreferencePairs",
    "PretrainText",
    "PromptSource",
    "Row",
    "SupervisedExamples",
    "check_same_vocabulary",
    "load_tokenizer",
    "read_rows",
]
