"""A mixture of experts: routing (top-k and sort by expert), combine, and expert parallelism."""

from cudnn.moe.combining import combine
from cudnn.moe.exchange import Exchange, Received
from cudnn.moe.quantizing import weights_changed
from cudnn.moe.routing import RouterOutput, Routing, load_balance_loss, route, sort, update_correction_bias, z_loss

__all__ = [
    "Exchange",
    "Received",
    "RouterOutput",
    "Routing",
    "combine",
    "load_balance_loss",
    "route",
    "sort",
    "update_correction_bias",
    "weights_changed",
    "z_loss",
]
