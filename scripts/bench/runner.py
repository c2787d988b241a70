"""Runs things that are to be compared in turn, and says how they compare: ratios with spread, machine, JSON.

The arms take turns, so that a machine that slows down slows all of them; what counts is the ratio of runs
that stood side by side, its median and quartiles.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from readers.machine import commit, machine, storage, versions

Arm = Callable[[], int]
"""Does some work and returns how many items it was."""


@dataclass
class Result:
    """Rates of the arms in items a second, one number a repeat, and what they were measured on."""

    name: str
    unit: str
    cache: str
    base: str
    rates: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def ratios(self, arm: str) -> list[float]:
        """Rate over the base arm's rate, repeat by repeat."""
        return [mine / other for mine, other in zip(self.rates[arm], self.rates[self.base], strict=True)]

    def lines(self) -> list[str]:
        """A table for people."""
        lines = [f"{self.name} ({self.cache} cache, {len(self.rates[self.base])} alternating repeats)"]
        for arm, rates in self.rates.items():
            low, middle, high = quartiles(self.ratios(arm))
            rate = f"{statistics.median(rates):>12,.0f} {self.unit}/s"
            lines.append(f"  {arm:<34}{rate}   ratio {middle:.2f} (p25 {low:.2f}, p75 {high:.2f})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        ratios = {
            arm: dict(zip(("p25", "median", "p75"), quartiles(self.ratios(arm)), strict=True)) for arm in self.rates
        }
        return {
            "name": self.name, "unit": f"{self.unit}/s", "cache": self.cache, "base": self.base,
            "rates": self.rates, "ratios": ratios, **self.facts,
        }  # fmt: skip


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(p25, median, p75)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def alternate(
    name: str, arms: Mapping[str, Arm], *, repeats: int, unit: str = "images", cache: str = "warm", **facts: Any
) -> Result:
    """Run every arm ``repeats`` times, in turn, after one run of each that does not count."""
    base = next(iter(arms))
    result = Result(name, unit, cache, base, {arm: [] for arm in arms}, facts)
    for repeat in range(repeats + 1):
        for arm, work in arms.items():
            started = time.perf_counter()
            items = work()
            if repeat:
                result.rates[arm].append(items / (time.perf_counter() - started))
    return result


def report(results: list[Result], work: str, json_path: str | None) -> None:
    """Print the tables, and write everything to ``json_path``."""
    for result in results:
        click.echo("\n".join(result.lines()))
    facts = {
        "command": sys.argv, "commit": commit(), "versions": versions(), "machine": machine(),
        "storage": storage(work), "results": [result.to_dict() for result in results],
    }  # fmt: skip
    click.echo(f"on {facts['machine']['processor']}, {facts['machine']['usable_cores']} cores, "
               f"{facts['storage']['file_system']}")  # fmt: skip
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=2) + "\n")
