"""How keys of cells and settings of runs are written for people."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from decaylab.training import RunSpec

NAMES = {
    **{"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST", "mlp": "MLP"},
    **{"vgg11": "VGG11", "vgg13": "VGG13", "vgg16": "VGG16", "vgg19": "VGG19"},
    **{"resnet20": "ResNet20", "resnet32": "ResNet32", "resnet44": "ResNet44"},
    **{"resnet56": "ResNet56", "sgd": "SGD", "adam": "Adam"},
    **{"kfac-f": "K-FAC-F", "kfac-g": "K-FAC-G", "l2": "L2", "wd": "weight decay"},
    **{"decoupled": "weight decay", "none": "no decay", "undecayed": "no decay, decay's settings"},
    **{"batch_size": "batch", "batch_norm_eps": "eps"},
}


def named(value: object) -> str:
    """A value of a key as people write it."""
    return NAMES.get(str(value), str(value))


def percent(value: float | None) -> str:
    """A share as a percentage in two digits."""
    return "—" if value is None else f"{100 * value:.2f}"


def counted_seeds(count: int) -> str:
    """`one seed`, `3 seeds`."""
    return "one seed" if count == 1 else f"{count} seeds"


def differing(*specs: RunSpec) -> list[str]:
    """The fields in which some specs are not all the same."""
    names = [field.name for field in fields(RunSpec)]
    return [name for name in names if len({getattr(spec, name) for spec in specs}) > 1]


def key_words(key: Mapping[str, object], columns: Sequence[str]) -> list[str]:
    """The values of some key columns, batch norm and augmentation as one, in their place.

    >>> key = {"dataset": "cifar10", "batch_norm": 1, "augment": 1, "optimizer": "sgd"}
    >>> key_words(key, ["dataset", "batch_norm", "augment", "optimizer"])
    ['CIFAR-10', 'BN + Aug', 'SGD']
    >>> key_words({"network": "vgg16", "batch_size": 640}, ["network", "batch_size"])
    ['VGG16', 'batch 640']
    """
    words = []
    for name in columns:
        if name == "batch_norm":
            both = [("BN", key["batch_norm"]), ("Aug", key.get("augment"))]
            words.append(" + ".join(word for word, on in both if str(on) == "1") or "no BN")
        elif name == "weight_decay":
            words.append("no decay" if str(key[name]) == "0" else "weight decay")
        elif name != "augment":
            number = isinstance(key[name], int | float)
            words.append(f"{named(name)} {key[name]}" if number else named(key[name]))
        elif "batch_norm" not in columns:
            words.append("no Aug" if str(key[name]) == "0" else "Aug")
    return words


def key_title(key: Mapping[str, object], columns: Sequence[str] | None = None) -> str:
    """The same in one text, of all columns unless told: `CIFAR-10, VGG16, BN + Aug`."""
    return ", ".join(key_words(key, list(key) if columns is None else columns))
