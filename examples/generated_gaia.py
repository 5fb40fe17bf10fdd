"""Generated problems in GAIA's format: questions of three levels about an attached CSV, JSON or text file of orders.

| level | question                                                  | steps                             |
|-------|-----------------------------------------------------------|-----------------------------------|
| 1     | a sum over the orders of one product                      | read, filter, add                 |
| 2     | the revenue of one customer, or the customers of a product | read, filter, multiply or sort   |
| 3     | the customer or products by revenue, or a difference      | read, group, multiply, compare    |

These problems share only the format and the scoring with GAIA. Results on them do not predict results on GAIA.

Invariants:
- Equal arguments give equal problems. A hash decides whether a problem is for training or held out.
- Each question has one right answer: customers and products differ in revenue.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

from trainer.episodes.episode import Problem

SOURCE = "gaia-format-level-{}"
"""`Problem.source`, in which {} is the level. So a report by source is also a report by level."""
HELD_OUT_MODULUS = 8
"""One in this number of problems is held out for evaluation."""
LEVELS = (1, 2, 3)
ORDERS_PER_LEVEL = 8
"""A file of level n has n times this number of orders."""
CUSTOMERS = ("Ada", "Bela", "Chen", "Dalia", "Emre")
PRODUCTS = ("lamp", "chair", "desk", "shelf", "rug")


class Order(NamedTuple):
    day: int
    customer: str
    product: str
    units: int
    price: int

    @property
    def revenue(self) -> int:
        return self.units * self.price


def generate(n: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Return `n` different `qa` problems with levels 1, 2, 3, 1, ... Their files are in the option `texts`."""
    rng = random.Random(f"gaia format {seed} {held_out}")
    problems: dict[str, Problem] = {}
    while len(problems) < n:
        level = LEVELS[len(problems) % len(LEVELS)]
        question, answer, suffix, text = _draw(level, rng)
        digest = blake2b(f"{question}\n{text}".encode(), digest_size=16).digest()
        if (digest[0] % HELD_OUT_MODULUS == 0) == held_out:
            id = str(UUID(bytes=digest))
            options = {"level": level, "texts": {f"{id}.{suffix}": text}}
            problems.setdefault(id, Problem(id, question, answer, SOURCE.format(level), "qa", options))
    return list(problems.values())


def _draw(level: int, rng: random.Random) -> tuple[str, str, str, str]:
    """Return a question, its answer, and the suffix and text of its file."""
    while True:
        orders = [
            Order(day, rng.choice(CUSTOMERS), rng.choice(PRODUCTS), rng.randint(1, 20), rng.randint(5, 95))
            for day in range(1, ORDERS_PER_LEVEL * level + 1)
        ]
        revenues = [_revenues(orders, field) for field in ("customer", "product")]
        if all(len(set(by_name.values())) == len(by_name) > 2 for by_name in revenues):
            break
    question, answer = rng.choice(_QUESTIONS[level])(orders, rng)
    suffix = rng.choice(list(_RENDERERS))
    return f"{question} The attached file lists the orders.", answer, suffix, _RENDERERS[suffix](orders)


def _revenues(orders: Sequence[Order], field: str) -> dict[str, int]:
    """Return the revenue of each customer or product, the largest first."""
    totals: dict[str, int] = {}
    for order in orders:
        name = getattr(order, field)
        totals[name] = totals.get(name, 0) + order.revenue
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _units_of_product(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    product = rng.choice(orders).product
    units = sum(order.units for order in orders if order.product == product)
    return f"How many units of the product {product} were ordered in total?", str(units)


def _units_of_customer(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    customer = rng.choice(orders).customer
    units = sum(order.units for order in orders if order.customer == customer)
    return f"How many units did {customer} order in total?", str(units)


def _revenue_of_customer(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    customer = rng.choice(orders).customer
    revenue = _revenues(orders, "customer")[customer]
    return f"How much did {customer} pay in total, if each order costs its units times the price?", str(revenue)


def _customers_of_product(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    product = rng.choice(orders).product
    customers = sorted({order.customer for order in orders if order.product == product})
    question = f"Which customers ordered the product {product}? Give the names in alphabetical order, with commas."
    return question, ", ".join(customers)


def _best_customer(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    question = "Which customer paid most in total, if each order costs its units times the price?"
    return question, next(iter(_revenues(orders, "customer")))


def _best_products(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    question = "Which three products earned most in total (units times price)? Give the highest first, with commas."
    return question, ", ".join(list(_revenues(orders, "product"))[:3])


def _difference_of_customers(orders: Sequence[Order], rng: random.Random) -> tuple[str, str]:
    totals = list(_revenues(orders, "customer").values())
    question = (
        "Add up units times price for each customer with at least one order. What is the difference between the "
        "largest and the smallest of these totals?"
    )
    return question, str(totals[0] - totals[-1])


def _as_csv(orders: Sequence[Order]) -> str:
    return "".join(f"{','.join(map(str, row))}\n" for row in (Order._fields, *orders))


def _as_json(orders: Sequence[Order]) -> str:
    return json.dumps({"orders": [order._asdict() for order in orders]}, indent=1) + "\n"


def _as_text(orders: Sequence[Order]) -> str:
    return "".join(
        f"Day {day}: {customer} ordered {units} units of the product {product} at {price} each.\n"
        for day, customer, product, units, price in orders
    )


_QUESTIONS: dict[int, tuple[Callable[[Sequence[Order], random.Random], tuple[str, str]], ...]] = {
    1: (_units_of_product, _units_of_customer),
    2: (_revenue_of_customer, _customers_of_product),
    3: (_best_customer, _best_products, _difference_of_customers),
}
_RENDERERS: dict[str, Callable[[Sequence[Order]], str]] = {"csv": _as_csv, "json": _as_json, "txt": _as_text}
