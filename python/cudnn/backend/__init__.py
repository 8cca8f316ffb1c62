"""libcudnn through ctypes: library, descriptors, handles, devices and execution plans."""

from cudnn.backend.device import DeviceProperties as DeviceProperties
from cudnn.backend.device import KernelCache as KernelCache
from cudnn.backend.engine import EngineConfig as EngineConfig
from cudnn.backend.engine import Knob as Knob
from cudnn.backend.engine import OperationGraph as OperationGraph
from cudnn.backend.handle import Handle as Handle
from cudnn.backend.library import is_available as is_available
from cudnn.backend.library import last_error as last_error
from cudnn.backend.library import load as load
from cudnn.backend.library import version as version
from cudnn.backend.library import version_string as version_string
from cudnn.backend.plan import ExecutionPlan as ExecutionPlan
from cudnn.backend.plan import PlanList as PlanList
