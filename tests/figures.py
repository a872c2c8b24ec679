"""What a role's collector shows Prometheus, as a map."""

from prometheus_client.registry import Collector


def figures_of(collector: Collector) -> dict[str, float]:
    """Values by name, and by the values of labels behind it: `name/whole`."""
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
