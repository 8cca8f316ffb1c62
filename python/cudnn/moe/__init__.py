"""A mixture of experts: routing tokens to experts, and combining what experts made of them."""

from cudnn.moe.combining import combine
from cudnn.moe.exchange import Exchange, Received
from cudnn.moe.routing import Routing, load_balance_loss, route, sort, z_loss

__all__ = ["Exchange", "Received", "Routing", "combine", "load_balance_loss", "route", "sort", "z_loss"]
