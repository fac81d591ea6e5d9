"""What runs on every user's machine."""

from flwr.app import Context

from private_digits.task import Split, losses, network, records_of
from sordino.federated import client_app


def own_records(context: Context) -> Split:
    """In a deployment, read the user's own data here."""
    return records_of(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


app = client_app(network, losses, own_records)
