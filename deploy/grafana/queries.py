"""Writes the expressions that many panels have in common: quantiles, rates, means and ratios.

The module knows nothing of what the metrics mean, or of Grafana.
"""

from __future__ import annotations

from deploy.grafana.panels import Query

RATE = "[$__rate_interval]"


def quantiles(metric: str, by: str = "", of: tuple[float, ...] = (0.5, 0.9, 0.99), more: str = "") -> list[Query]:
    """Returns quantiles of a histogram; `by` is a label by which they are shown, and `more` selects series. A quantile
    alone by a label has the name of the label, since the title of its panel names the quantile."""
    labels = f"le, {by}" if by else "le"
    shown = f"{{{{{by}}}}}" if by else ""
    return [
        Query(
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{@{more}}}{RATE})))",
            shown if by and len(of) == 1 else f"p{q * 100:g} {shown}".rstrip(),
        )
        for q in of
    ]


def per_second(metric: str, by: str, legend: str, more: str = "") -> Query:
    """Returns the rate of a counter by labels."""
    return Query(f"sum by ({by}) (rate({metric}{{@{more}}}{RATE}))", legend)


def mean(metric: str, by: str, legend: str) -> Query:
    """Returns the mean of a histogram's observations by labels."""
    return Query(
        f"sum by ({by}) (rate({metric}_sum{{@}}{RATE})) / sum by ({by}) (rate({metric}_count{{@}}{RATE}))", legend
    )


def ratio(above: str, below: str, by: str, legend: str) -> Query:
    """Returns the rate of a counter, divided by that of another one, by labels."""
    return Query(f"sum by ({by}) (rate({above}{{@}}{RATE})) / sum by ({by}) (rate({below}{{@}}{RATE}))", legend)


def of_each(metric: str, kind: str) -> Query:
    """Returns a gauge of each encoder or worker."""
    return Query(f"sum by ({kind}) ({metric}{{@}})", f"{{{{{kind}}}}}")
