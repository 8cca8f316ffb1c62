"""Dry-run copies of a graph: steps tried on the copy do not change the original."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cudnn.backend.device import DeviceProperties
from cudnn.errors import cudnnGraphNotSupportedError
from cudnn.pygraph.node import Node

if TYPE_CHECKING:
    from cudnn.pygraph.graph import pygraph

REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, cudnnGraphNotSupportedError)


def dry_run_copy(graph: pygraph, nodes: Sequence[Node] | None = None) -> pygraph:
    """A graph with the same settings over copies of the nodes, or over the nodes given. Nothing is built.

    It has no kernel cache: a cache belongs to the topology of the first graph that is built with it.
    """
    dry_run = copy.copy(graph)
    dry_run.nodes = copy.deepcopy(graph.nodes) if nodes is None else list(nodes)
    dry_run._kernel_cache = None
    dry_run._forget_program()
    return dry_run


def for_device(graph: pygraph, properties: DeviceProperties) -> pygraph:
    """The graph, not built, as one for a described device, whatever machine or executor it was made for."""
    dry_run = dry_run_copy(graph)
    dry_run._handle, dry_run._backend, dry_run._arrays_on = None, None, set()
    dry_run._device_property = properties
    capability = json.loads(properties.serialize())["deviceVer"] // 10
    dry_run.context = dataclasses.replace(dry_run.context, sm_version=capability)
    return dry_run
