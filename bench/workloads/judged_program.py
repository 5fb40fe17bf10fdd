"""A program with tests, such as RL on code judges. It finds shortest paths in a small graph, and has 60 lines and
inputs of a few hundred bytes. The expected outputs are computed by another algorithm."""

from __future__ import annotations

import random
from typing import Any

PROGRAM = '''\
import sys
import heapq
from collections import defaultdict


INF = float("inf")


class Graph:
    """A directed graph with edge weights."""

    def __init__(self, n):
        self.n = n
        self.edges = defaultdict(list)

    def add_edge(self, u, v, w):
        self.edges[u].append((v, w))
        self.edges[v].append((u, w))

    def shortest_paths(self, source):
        dist = [INF] * (self.n + 1)
        parent = [0] * (self.n + 1)
        dist[source] = 0
        heap = [(0, source)]
        while heap:
            d, u = heapq.heappop(heap)
            if d > dist[u]:
                continue
            for v, w in self.edges[u]:
                candidate = d + w
                if candidate < dist[v]:
                    dist[v] = candidate
                    parent[v] = u
                    heapq.heappush(heap, (candidate, v))
        return dist, parent


def read_graph(tokens):
    n, m = int(next(tokens)), int(next(tokens))
    graph = Graph(n)
    for _ in range(m):
        u, v, w = (int(next(tokens)) for _ in range(3))
        graph.add_edge(u, v, w)
    return graph


def format_answer(dist):
    return " ".join("-1" if d == INF else str(d) for d in dist[1:])


def main():
    tokens = iter(sys.stdin.read().split())
    graph = read_graph(tokens)
    queries = int(next(tokens))
    answers = []
    for _ in range(queries):
        source = int(next(tokens))
        dist, _ = graph.shortest_paths(source)
        answers.append(format_answer(dist))
    print("\\n".join(answers))


if __name__ == "__main__":
    main()
'''
NODES, EDGES, QUERIES = 16, 30, 4


def make_tests(count: int, seed: int) -> list[dict[str, Any]]:
    """Return tests as `/v1/judge` takes them."""
    rng = random.Random(seed)
    return [_make_test(rng) for _ in range(count)]


def _make_test(rng: random.Random) -> dict[str, Any]:
    nodes = range(1, NODES + 1)
    edges = [(rng.choice(nodes), rng.choice(nodes), rng.randint(1, 1000)) for _ in range(EDGES)]
    sources = [rng.choice(nodes) for _ in range(QUERIES)]
    lines = [f"{NODES} {EDGES}", *(f"{u} {v} {w}" for u, v, w in edges), str(QUERIES), *map(str, sources)]
    distances = _all_distances(edges)
    answers = (" ".join(str(distances.get((source, node), -1)) for node in nodes) for source in sources)
    return {"stdin": "\n".join(lines) + "\n", "expected": "\n".join(answers) + "\n"}


def _all_distances(edges: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    """Return the distances of all connected pairs of nodes, by Floyd and Warshall."""
    nodes = range(1, NODES + 1)
    distances = {(node, node): 0 for node in nodes}
    for u, v, w in edges:
        for pair in ((u, v), (v, u)):
            distances[pair] = min(distances.get(pair, w), w)
    for middle in nodes:
        for u in nodes:
            for v in nodes:
                if (u, middle) in distances and (middle, v) in distances:
                    through = distances[u, middle] + distances[middle, v]
                    distances[u, v] = min(distances.get((u, v), through), through)
    return distances
