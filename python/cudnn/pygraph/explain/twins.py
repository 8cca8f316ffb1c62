"""Graphs over copies of another graph's nodes: what is tried on them leaves the other as it is."""

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


def twin_of(graph: pygraph, nodes: Sequence[Node] | None = None) -> pygraph:
    """A graph with the same settings over copies of the nodes, or over the nodes given. Nothing is built.

    It has no kernel cache: a cache belongs to the topology of the first graph that is built with it.
    """
    twin = copy.copy(graph)
    twin.nodes = copy.deepcopy(graph.nodes) if nodes is None else list(nodes)
    twin._kernel_cache = None
    twin._forget_program()
    return twin


def for_device(graph: pygraph, properties: DeviceProperties) -> pygraph:
    """The graph, not built, as one for a described device, whatever machine or executor it was made for."""
    twin = twin_of(graph)
    twin._handle, twin._backend, twin._arrays_on = None, None, set()
    twin._device_property = properties
    capability = json.loads(properties.serialize())["deviceVer"] // 10
    twin.context = dataclasses.replace(twin.context, sm_version=capability)
    return twin
