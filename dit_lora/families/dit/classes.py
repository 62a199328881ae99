"""The classes of a DiT: names, rows of its label tables, and where the null class is; a checkpoint that has some.

A table of n classes has n + 1 rows. The null class is row n, but never beyond 1000: Diffusers' DiTPipeline
guides with row 1000 whatever the table, so classes that are added to ImageNet's 1000 go behind it.
"""

import difflib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from diffusers import DiTPipeline as StockPipeline
from torch import nn

from dit_lora.config.recipe import Recipe
from dit_lora.data.sources.scan import class_names
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import TensorSpec, TextEncoder
from dit_lora.families.noise_prediction import NoisePrediction
from dit_lora.families.opening import load_or_init

STOCK_NULL = 1000  # diffusers/pipelines/dit/pipeline_dit.py: class_null
TABLE = "transformer_blocks.{}.norm1.emb.class_embedder.embedding_table.weight"


@dataclass(frozen=True)
class ClassTable:
    """`count` classes, of which some have names; a row's value may hold several, separated by commas."""

    count: int
    names: Mapping[int, str]

    @classmethod
    def of_names(cls, names: Sequence[str], count: int | None = None) -> Self:
        """The first classes of a table that has no other."""
        table = cls(max(count or 0, len(names)), {})
        return cls(table.count, dict(zip(table.rows(), names, strict=False)))

    @property
    def null(self) -> int:
        return min(self.count, STOCK_NULL)

    def rows(self) -> list[int]:
        """Return the rows of the classes, in order: around the null row."""
        return [row for row in range(self.count + 1) if row != self.null]

    def row(self, name: str) -> int | None:
        """Return the row of a name, of one of its synonyms, or of a row's number where no class has a number for a name.

        As in DiTPipeline, the last of equal names wins.
        """
        if name == "":
            return self.null
        parts = {part.strip(): row for row, value in self._named() for part in value.split(",")}
        labels = parts | {value: row for row, value in self._named()}
        if name in labels:
            return labels[name]
        if name.isdecimal() and not any(label.isdecimal() for label in labels):
            return int(name) if int(name) in self.rows() else None
        rows = {labels.get(part.strip()) for part in name.split(",")}
        return rows.pop() if len(rows) == 1 else None

    def extended(self, names: Sequence[str]) -> Self:
        """Return the classes with new ones at the end; the rows of the old ones stay."""
        wider = type(self)(self.count + len(names), {})
        rows = wider.rows()[self.count :]
        return replace(wider, names={**self.names, **dict(zip(rows, names, strict=True))})

    def labels(self) -> dict[str, str]:
        """Return the classes as model_index.json's `id2label`."""
        return {str(row): value for row, value in self._named()}

    def near(self, name: str) -> list[str]:
        """Names to choose from: all of a short table, else the nearest."""
        values = [value for _, value in self._named()]
        if len(values) <= 50:
            return values
        parts = {part.strip(): value for value in values for part in value.split(",")}
        close = difflib.get_close_matches(name, parts, n=8, cutoff=0.4)
        return [*dict.fromkeys(parts[part] for part in close), f"and others, {len(values)} in all"]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.count, self.labels()]).encode()).hexdigest()

    def grown(self, weight: torch.Tensor, old: "ClassTable") -> torch.Tensor:
        """The label table for these classes from that of the old ones; new classes start as the null class."""
        rows = weight[old.null].repeat(self.count + 1, 1)
        rows[old.rows()] = weight[old.rows()]
        return rows

    def _named(self) -> list[tuple[int, str]]:
        return sorted(self.names.items())


@dataclass(frozen=True, kw_only=True)
class ClassCheckpoint(NoisePrediction):
    """A checkpoint that is conditioned on classes: a caption is a class's name, and "" the null class."""

    stored: ClassTable
    """The classes of the files."""
    classes: ClassTable
    """The classes that it is trained on."""
    count_key: ClassVar[str]
    """The name that the number of classes has in the transformer's config."""
    takes: ClassVar[tuple[str, ...]] = ("data.classes", "train.vlb")

    @abstractmethod
    def require_rows_train(self, recipe: Recipe, new: Sequence[str]) -> None:
        """Raise unless the rows of new classes, which are base weights, train in mode `lora`."""

    @abstractmethod
    def grow(self, transformer: Any) -> None:
        """Give the label tables of a loaded transformer, and its config, the classes that are trained on."""

    @property
    def class_names(self) -> Sequence[str]:
        return tuple(self.stored.labels().values())

    def for_recipe(self, recipe: Recipe) -> Self:
        """Take the classes of the data: new ones are added, from scratch they are all there is."""
        fitting = super().for_recipe(recipe)
        classes = self._classes_for(recipe, class_names(recipe.data, recipe.cache_dir))
        absent = unknown(recipe.validation.prompts, classes)
        if absent:
            what = f"validation.prompts: no class {', '.join(map(repr, absent))}; there are"
            raise DitLoraError(listed(what, classes.near(absent[0])))
        return fitting.with_classes(classes)

    def with_classes(self, classes: ClassTable) -> Self:
        config = {**self.transformer_config, self.count_key: classes.count}
        return replace(self, transformer_config=config, classes=classes)

    def text_limit(self) -> None:
        return None

    def text_facts(self) -> Mapping[str, Any]:
        return {"classes": self.classes.digest()}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return {"class_labels": (torch.Size(()), torch.int64)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Names of classes to rows of the label tables, int64 (B,); "" is the null class."""
        return lambda names: {"class_labels": torch.tensor([self.row(name) for name in names])}

    def load_transformer(self, dtype: torch.dtype) -> Any:
        scratch = self.from_scratch
        if scratch is not None:
            scratch = {**scratch, self.count_key: self.classes.count}
        transformer = load_or_init(self.transformer_class, self.path, dtype, scratch)
        if scratch is None and self.classes.count > self.stored.count:
            self.grow(transformer)
        return transformer

    def index_changes(self) -> dict[str, Any]:
        return {} if self.classes == self.stored else {"id2label": self.classes.labels()}

    def config_changes(self) -> dict[str, Any]:
        return {} if self.classes == self.stored else {self.count_key: self.classes.count}

    def as_trained(self, index: Mapping[str, Any]) -> Self:
        labels = {int(row): name for row, name in index["id2label"].items()}
        added = [labels[row] for row in sorted(set(labels) - set(self.stored.rows()))]
        return self.with_classes(self.stored.extended(added))

    def row(self, name: str) -> int:
        """The row of a class by its name; raises with the nearest names where there is none."""
        row = self.classes.row(name)
        if row is None:
            nearest = self.classes.near(name)
            raise DitLoraError(listed(f"{self.path.name} has no class {name!r}; it has", nearest))
        return row

    def _classes_for(self, recipe: Recipe, names: Sequence[str]) -> ClassTable:
        if self.from_scratch is not None:
            asked = self.from_scratch.get(self.count_key)
            if asked is not None and asked < len(names):
                raise DitLoraError(
                    f"model.from_scratch.{self.count_key} is {asked}, and the data has {len(names)} "
                    "classes; leave it out to have as many"
                )
            return type(self.stored).of_names(names, asked)
        new = unknown(names, self.stored)
        if new and recipe.train.mode == "lora":
            self.require_rows_train(recipe, new)
        return self.stored.extended(new)


def names_of(index: Mapping[str, Any]) -> dict[int, str]:
    """The names of classes by their rows, as a model_index.json has them."""
    return {int(row): name for row, name in (index.get("id2label") or {}).items()}


def unknown(names: Iterable[str], classes: ClassTable) -> list[str]:
    """The names without a row, each once, sorted."""
    return sorted({name for name in names if classes.row(name) is None})


class DiTPipeline(StockPipeline):
    """Diffusers' DiTPipeline, which guides with the null row of a table of less than 1000 classes too.

    It has the stock name, so that what it saves says so.
    """

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = self
        with _null_row(own.transformer):
            return StockPipeline.__call__(own, *args, **kwargs)


@contextmanager
def _null_row(transformer: Any) -> Iterator[None]:
    """Within it, the stock null row is the table's own."""
    null = min(transformer.config.num_embeds_ada_norm, STOCK_NULL)

    def own(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = kwargs["class_labels"]
        return args, {**kwargs, "class_labels": torch.where(labels == STOCK_NULL, null, labels)}

    with transformer.register_forward_pre_hook(own, with_kwargs=True):
        yield


def embedders(transformer: Any) -> list[Any]:
    """Timestep and label embedders, one of each a block."""
    return [block.norm1.emb for block in transformer.transformer_blocks]


def keep_labels(transformer: Any) -> None:
    """No block drops labels by itself while training: `data.caption_dropout` drops a sample's label in all.

    Diffusers' LabelEmbedding draws for each block, so that one call would mix a label with the null class.
    """
    for embedder in embedders(transformer):
        embedder.class_embedder.dropout_prob = 0.0


def grow(transformer: Any, classes: ClassTable, old: ClassTable) -> None:
    """Give every block's label table, and the config, these classes."""
    for embedder in embedders(transformer):
        labels = embedder.class_embedder
        weight = classes.grown(labels.embedding_table.weight.data, old)
        labels.embedding_table = nn.Embedding.from_pretrained(weight, freeze=True)
        labels.num_classes = classes.count
    transformer.register_to_config(num_embeds_ada_norm=classes.count)


def initialise(transformer: Any) -> None:
    """Start as DiT does (arXiv 2212.09748, section 3.2): every block the identity, the output zero.

    Linear layers are Xavier-uniform with zero biases, embedders N(0, 0.02) and alike in all blocks.
    """
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            _zero(module.bias)
    patches = transformer.pos_embed.proj
    nn.init.xavier_uniform_(patches.weight.view(len(patches.weight), -1))
    _zero(patches.bias)
    own = embedders(transformer)
    first = own[0]
    for weight in (
        first.timestep_embedder.linear_1.weight,
        first.timestep_embedder.linear_2.weight,
        first.class_embedder.embedding_table.weight,
    ):
        nn.init.normal_(weight, std=0.02)
    for other in own[1:]:
        other.load_state_dict(first.state_dict())
    outputs = (transformer.proj_out_1, transformer.proj_out_2)
    modulations = (block.norm1.linear for block in transformer.transformer_blocks)
    for linear in (*outputs, *modulations):
        nn.init.zeros_(linear.weight)
        _zero(linear.bias)


def _zero(bias: torch.Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
