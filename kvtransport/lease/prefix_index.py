"""Longest-prefix search over the digest chains of many holdings.

Architecture
    A compacted trie in which every node covers a range of depths (in groups)
    that its holdings share, with one hash-table entry per node: the node is
    filed under the digest at its *handle*, the depth in its range that is
    divisible by the highest power of two.  Because a chain's digest at depth
    ``d`` names the whole prefix of ``d`` groups, a binary search over handles
    finds the deepest node of a query in O(log groups) look-ups ("z-fast trie",
    Belazzougui, Boldi, Pagh, Vigna 2009).  Insertion and removal change at most
    three nodes.  Memory is at most two nodes per holding, however long.

    References only lead down, from the root to holdings: up, a node knows its
    parent's number and a holding its node's.  Without cycles, a hundred thousand
    of them are nothing that the garbage collector has to visit, on a thread that
    has steps to schedule.

Threading
    None of its own; the ledger's lock covers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from kvtransport.lease.digest import DIGEST_NBYTES as N
from kvtransport.lease.holding import Holding

_Ends: TypeAlias = "Holding | dict[int, Holding] | None"


_WALK = 8


class Node(msgspec.Struct, eq=False, gc=False):
    """Depths ``start`` < d <= ``end`` of ``chain``; ``ends`` are holdings of exactly ``end``.

    ``number`` is not 0, save for the root; ``parent`` is another node's.  While
    it is attached, ``handle`` and ``branch`` are the keys under which the index
    and the parent file it.
    """

    number: int
    parent: int
    chain: bytes
    start: int
    end: int
    children: dict[bytes, Node] | None = None
    ends: _Ends = None
    handle: bytes = b""
    branch: bytes = b""

    def __repr__(self) -> str:
        return f"Node({self.number}, {self.start}, {self.end})"

    def name(self) -> None:
        """Set ``handle`` and ``branch`` for the present range."""
        start, end = self.start, self.end
        depth = end & (-1 << ((start ^ end).bit_length() - 1))
        self.handle = self.chain[(depth - 1) * N : depth * N]
        self.branch = self.chain[start * N : (start + 1) * N]

    def holdings(self) -> Iterator[Holding]:
        if isinstance(self.ends, dict):
            yield from self.ends.values()
        elif self.ends is not None:
            yield self.ends

    def newest(self) -> Holding | None:
        if isinstance(self.ends, dict):
            return next(reversed(self.ends.values()))
        return self.ends


def common_groups(a: bytes, b: bytes, known: int = 0, limit: int | None = None) -> int:
    """Number of leading groups that two chains share, from ``known`` to ``limit``."""
    low, high = known, min(len(a), len(b)) // N
    if limit is not None and limit < high:
        high = limit
    if a[(high - 1) * N : high * N] == b[(high - 1) * N : high * N]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * N, middle * N)
        if a[at] == b[at]:
            low = middle
        else:
            high = middle - 1
    return low


class Place(msgspec.Struct, frozen=True, gc=False):
    """The deepest node that a chain reaches, and how many groups they share.

    The depth is 0, with the root, when nothing is shared.  Any change of the
    index makes the place outdated, which ``version`` tells.
    """

    node: Node
    depth: int
    version: int


class PrefixIndex:
    """Finds the holding that shares the longest prefix with a chain."""

    def __init__(self) -> None:
        self._root = Node(0, 0, b"", 0, 0)
        self._nodes = {0: self._root}
        self._last = 0
        self._handles: dict[bytes, Node] = {}
        self._version = 0

    def __len__(self) -> int:
        """Number of nodes, for tests of the memory bound."""
        return len(self._nodes) - 1

    def find(self, chain: bytes) -> Place:
        """Where ``chain`` ends in the trie or leaves it.

        Behind the end of a chain its slices are empty, so they differ from any digest.
        """
        groups = len(chain) // N
        node = self._root
        # Walking is faster than searching as long as the way is short.
        for _ in range(_WALK):
            start = node.end
            children = node.children
            child = children.get(chain[start * N : (start + 1) * N]) if children else None
            if child is None:
                return Place(node, start, self._version)
            end = child.end
            at = slice((end - 1) * N, end * N)
            if chain[at] != child.chain[at]:
                return Place(child, self._inside(child, chain, start + 1), self._version)
            node = child
        return self._search(chain, groups, node)

    def _search(self, chain: bytes, groups: int, node: Node) -> Place:
        """``find`` below ``node``, in O(log groups) however deep the trie is."""
        handles = self._handles
        low, high = node.end, groups
        while low < high:
            depth = high & (-1 << ((low ^ high).bit_length() - 1))
            found = handles.get(chain[(depth - 1) * N : depth * N])
            if found is None:
                high = depth - 1
                continue
            node, end = found, found.end
            at = slice((end - 1) * N, end * N)
            if chain[at] != found.chain[at]:
                return Place(found, self._inside(found, chain, depth), self._version)
            low = end
        child = (
            node.children.get(chain[node.end * N : (node.end + 1) * N]) if node.children else None
        )
        if child is None:
            return Place(node, node.end, self._version)
        return Place(child, self._inside(child, chain, child.start + 1), self._version)

    @staticmethod
    def _inside(node: Node, chain: bytes, known: int) -> int:
        return common_groups(chain, node.chain, known, node.end)

    def any_holding(self, node: Node) -> Holding | None:
        """The newest holding of the node, else one further down; ``None`` only for the root."""
        while True:
            newest = node.newest()
            if newest is not None:
                return newest
            if not node.children:
                return None
            node = next(reversed(node.children.values()))

    def prefixes(self, place: Place) -> list[Holding]:
        """Holdings whose full groups are all a prefix of the chain found, longest first."""
        node, depth = place.node, place.depth
        found: list[Holding] = []
        while node.number:
            if node.ends is not None and node.end <= depth:
                found.extend(node.holdings())
            node = self._nodes[node.parent]
        return found

    def add(self, holding: Holding, place: Place) -> None:
        """File a holding of at least one group, whose chain was found at ``place``."""
        chain, groups = holding.chain, holding.groups
        if place.version != self._version:
            place = self.find(chain)
        self._version += 1
        node, depth = place.node, place.depth
        if depth < node.end:
            node = self._split(node, depth)
        if depth < groups:
            node = self._attach(self._new(node.number, chain, depth, groups))
        holding.node = node.number
        if node.ends is None:
            node.ends = holding
        elif isinstance(node.ends, dict):
            node.ends[holding.holding_id] = holding
        else:
            node.ends = {node.ends.holding_id: node.ends, holding.holding_id: holding}

    def remove(self, holding: Holding) -> None:
        """Take a holding out; does nothing when it is not filed."""
        if not holding.node:
            return
        node, holding.node = self._nodes[holding.node], 0
        self._version += 1
        if isinstance(node.ends, dict):
            del node.ends[holding.holding_id]
            if node.ends:
                return
        node.ends = None
        if not node.children:
            node = self._delete(node)
        if node.number and node.ends is None and node.children and len(node.children) == 1:
            self._merge(node)

    def _new(self, parent: int, chain: bytes, start: int, end: int) -> Node:
        self._last = number = self._last + 1
        node = self._nodes[number] = Node(number, parent, chain, start, end)
        return node

    def _delete(self, node: Node) -> Node:
        del self._nodes[node.number]
        return self._detach(node)

    def _attach(self, node: Node) -> Node:
        parent = self._nodes[node.parent]
        if parent.children is None:
            parent.children = {}
        node.name()
        parent.children[node.branch] = node
        self._handles[node.handle] = node
        return node

    def _detach(self, node: Node) -> Node:
        parent = self._nodes[node.parent]
        assert parent.children is not None
        del parent.children[node.branch]
        if not parent.children:
            parent.children = None
        del self._handles[node.handle]
        return parent

    def _split(self, node: Node, depth: int) -> Node:
        """Put a new node over the first part of ``node``; returns the new one."""
        upper = self._new(self._detach(node).number, node.chain, node.start, depth)
        self._attach(upper)
        node.parent, node.start = upper.number, depth
        self._attach(node)
        return upper

    def _merge(self, node: Node) -> None:
        """Join a node that neither ends a holding nor branches with its only child."""
        assert node.children is not None
        child = next(iter(node.children.values()))
        self._detach(child)
        parent = self._delete(node)
        child.parent, child.start = parent.number, node.start
        self._attach(child)
