"""The lifecycle of KV-cache memory in LLM engines, as explicit transition tables.

    from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager
    from kvstate.gpu import open_device

See `Manager` for the calls, `kvstate.spec` for the tables and the laws.
"""

from kvstate.checking import check
from kvstate.config import Config, GpuTier, HostTier, LayerSpec
from kvstate.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    ConfigError,
    DeadView,
    DeviceError,
    DeviceFault,
    HostExhausted,
    IllegalTransition,
    KvStateError,
    LawViolation,
    NestedCall,
    NotCopied,
    OutOfFrames,
    OutOfRows,
    StaleAddress,
    StreamCaptured,
    TraceError,
)
from kvstate.manager import Manager
from kvstate.sequence import Batch, Sequence, Step
from kvstate.stats import Stats
from kvstate.tensors import TensorView

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Batch",
    "CapacityError",
    "Config",
    "ConfigError",
    "DeadView",
    "DeviceError",
    "DeviceFault",
    "GpuTier",
    "HostExhausted",
    "HostTier",
    "IllegalTransition",
    "KvStateError",
    "LawViolation",
    "LayerSpec",
    "Manager",
    "NestedCall",
    "NotCopied",
    "OutOfFrames",
    "OutOfRows",
    "Sequence",
    "StaleAddress",
    "Stats",
    "Step",
    "StreamCaptured",
    "TensorView",
    "TraceError",
    "check",
]
