"""What `forebay.data` is asked to do, checked."""

import dataclasses
import json

from .errors import ConfigError

# key: (accepted types, what they are called, default); no default: required
_KEYS = {
    "op": (str, "a string"),
    "model_dir": (str, "a string"),
    "dataset": (str, "a string"),
    "dataset_dir": (str, "a string", "data"),
    "eval_dataset": ((str, type(None)), "a string or null", None),
    "val_size": ((int, float), "a number", 0),
    "stage": (str, "a string", "sft"),
    "cutoff_len": (int, "an integer", 2048),
    "train_on_prompt": (bool, "true or false", False),
    "mask_history": (bool, "true or false", False),
    "system": ((str, type(None)), "a string or null", None),
    "max_samples": (int, "an integer", 0),
    "seed": (int, "an integer", 42),
    "vocab": (int, "an integer"),
    "out_dir": ((str, type(None)), "a string or null", None),
    "preview": (int, "an integer", 3),
}


@dataclasses.dataclass(frozen=True)
class Request:
    op: str
    model_dir: str
    dataset: str
    dataset_dir: str
    eval_dataset: str | None
    val_size: float
    stage: str
    cutoff_len: int
    train_on_prompt: bool
    mask_history: bool
    system: str | None
    max_samples: int
    seed: int
    vocab: int
    out_dir: str | None
    preview: int

    def meaning(self):
        """The keys that decide what a shard holds; the model and the data themselves are fingerprinted by content."""
        keys = ("val_size", "stage", "cutoff_len", "train_on_prompt", "mask_history", "system", "max_samples", "seed",
                "vocab")
        return {key: getattr(self, key) for key in keys}


def parse(line):
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"the request is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError("the request is not a JSON object")
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ConfigError(f"the request has the unknown key '{unknown[0]}'")
    values = {}
    for key, (types, called, *default) in _KEYS.items():
        if key not in given:
            if not default:
                raise ConfigError(f"the request lacks '{key}'")
            values[key] = default[0]
            continue
        value = given[key]
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise ConfigError(f"{key} is {json.dumps(value)}; expected {called}")
        values[key] = value
    request = Request(**values)
    _check(request)
    return request


def _check(r):
    if r.op not in ("build", "preview"):
        raise ConfigError(f"op is '{r.op}'; expected 'build' or 'preview'")
    if r.op == "build" and not r.out_dir:
        raise ConfigError("a build needs out_dir, the folder for its token shards")
    if r.stage not in ("sft", "pt"):
        raise ConfigError(f"stage is '{r.stage}'; expected 'sft' or 'pt'")
    if not r.dataset.strip():
        raise ConfigError("dataset is empty; expected a path, or names from dataset_info.json")
    if not 2 <= r.cutoff_len < 2**32:
        raise ConfigError(f"cutoff_len is {r.cutoff_len}; expected at least 2, since a document's first token is not learned")
    if not 1 <= r.vocab <= 2**31:
        raise ConfigError(f"vocab is {r.vocab}; expected 1 to 2^31")
    if r.max_samples < 0:
        raise ConfigError(f"max_samples is {r.max_samples}; expected a number of rows, 0 for all")
    if r.op == "preview" and r.preview < 1:
        raise ConfigError(f"preview is {r.preview}; expected at least one row")
    if not (0 <= r.val_size < 1 or (r.val_size < 2**53 and r.val_size == int(r.val_size))):
        raise ConfigError(f"val_size is {r.val_size}; expected a fraction below 1, or a whole number of rows")
    if r.val_size and r.eval_dataset:
        raise ConfigError("val_size and eval_dataset are both given; expected one of them")
