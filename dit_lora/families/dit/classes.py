"""The classes of a DiT (names, rows of its label tables, the null class), and a checkpoint conditioned on them.

A table of n classes has n + 1 rows. The null class is row n, but at most row 1000: Diffusers' DiTPipeline always
guides with row 1000, so classes that are added to ImageNet's 1000 come after it.
"""

import difflib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from diffusers import DiTPipeline as StockPipeline
from torch import nn

from dit_lora.config.recipe import Recipe
from dit_lora.data.sources.scan import find_class_names_in_data
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import CheckpointInfo, Encoders, TensorSpec, TextEncoder
from dit_lora.families.opening import load_or_init_transformer

STOCK_NULL_ROW = 1000  # diffusers/pipelines/dit/pipeline_dit.py: class_null
# Name of a block's label table; the field is the block's number.
LABEL_TABLE_NAME = "transformer_blocks.{}.norm1.emb.class_embedder.embedding_table.weight"


@dataclass(frozen=True)
class ClassTable:
    """Table of a class-conditional model's classes, some of them named.

    A name may hold several synonyms, separated by commas.
    """

    count: int
    names: Mapping[int, str]

    @classmethod
    def from_names(cls, names: Sequence[str], count: int | None = None) -> Self:
        """Create a class table whose first classes have these names."""
        # The names are placed after the count is known, because the null row depends on it.
        table = cls(max(count or 0, len(names)), {})
        return cls(table.count, dict(zip(table.rows(), names, strict=False)))

    @property
    def null_label_row(self) -> int:
        # From 1000 classes on, the null row stays at 1000.
        return min(self.count, STOCK_NULL_ROW)

    def rows(self) -> list[int]:
        """Row numbers of the classes in a label table, in order, without the null row."""
        return [row for row in range(self.count + 1) if row != self.null_label_row]

    def find_label_row(self, name: str) -> int | None:
        """Row of a class, found by its name or one of its synonyms; None if no class has it.

        If no class has a number as its name, a number selects a row. Of equal names the last wins, as in DiTPipeline.
        """
        # The empty caption: caption dropout and the negative prompt.
        if name == "":
            return self.null_label_row
        # Synonyms can be used too, but a complete name takes precedence over them.
        parts = {part.strip(): row for row, value in self._sorted_names() for part in value.split(",")}
        labels = parts | {value: row for row, value in self._sorted_names()}
        if name in labels:
            return labels[name]
        if name.isdecimal() and not any(label.isdecimal() for label in labels):
            return int(name) if int(name) in self.rows() else None
        # Several synonyms of one class, in any order, still name that class.
        # All parts must name the same class. An unknown part adds None to the set.
        rows = {labels.get(part.strip()) for part in name.split(",")}
        return rows.pop() if len(rows) == 1 else None

    def append_new_classes(self, names: Sequence[str]) -> Self:
        """Copy of the class table with new classes appended; the rows of the old classes stay the same."""
        # Build the wider table first: it knows which rows are classes.
        wider = type(self)(self.count + len(names), {})
        rows = wider.rows()[self.count :]
        return replace(wider, names={**self.names, **dict(zip(rows, names, strict=True))})

    def labels(self) -> dict[str, str]:
        """The class names by row, in the format of `id2label` in model_index.json."""
        return {str(row): value for row, value in self._sorted_names()}

    def suggest_names(self, name: str) -> list[str]:
        """Class names to suggest for an unknown name: all of a short table, else the most similar."""
        values = [value for _, value in self._sorted_names()]
        if len(values) <= 50:
            return values
        parts = {part.strip(): value for value in values for part in value.split(",")}
        close = difflib.get_close_matches(name, parts, n=8, cutoff=0.4)
        # Several synonyms may lead to one class: keep each name once, best match first.
        return [*dict.fromkeys(parts[part] for part in close), f"and others, {len(values)} in all"]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.count, self.labels()]).encode()).hexdigest()

    def expand_label_weight(self, weight: torch.Tensor, old_classes: "ClassTable") -> torch.Tensor:
        """Weights of the label table for these classes, copied from those of the old ones.

        New classes start as the null class.
        """
        # (classes + 1, width), initially all copies of the null class.
        rows = weight[old_classes.null_label_row].repeat(self.count + 1, 1)
        # Old classes keep their rows.
        rows[old_classes.rows()] = weight[old_classes.rows()]
        return rows

    def _sorted_names(self) -> list[tuple[int, str]]:
        return sorted(self.names.items())


@dataclass(frozen=True, kw_only=True)
class ClassInfo(CheckpointInfo):
    """Info of a class-conditional checkpoint: a caption is the name of a class, and "" the null class."""

    stored_classes: ClassTable
    """The classes in the checkpoint's files."""
    trained_classes: ClassTable
    """The classes that are trained."""
    num_classes_key: ClassVar[str]
    """Option of the transformer's config that holds the number of classes."""
    supported_options: ClassVar[tuple[str, ...]] = ("data.classes",)

    @abstractmethod
    def require_trainable_rows(self, recipe: Recipe, new_classes: Sequence[str]) -> None:
        """Raise `DitLoraError` unless the rows of new classes, which are base weights, train in mode `lora`."""

    @property
    def class_names(self) -> Sequence[str]:
        return tuple(self.stored_classes.labels().values())

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Apply the classes of the data. New ones are appended; with `model.from_scratch` they are the only ones."""
        info = super().copy_with_recipe_settings(recipe, training_options)
        classes = self._select_classes(recipe, find_class_names_in_data(recipe.data, recipe.cache_dir))
        # Prompts of validation samples may name new classes too, so check them against the extended table.
        unknown_prompts = find_unknown_names(recipe.validation.prompts, classes)
        if unknown_prompts:
            problem = f"validation.prompts: unknown class {', '.join(map(repr, unknown_prompts))}; choose from"
            raise DitLoraError(format_list(problem, classes.suggest_names(unknown_prompts[0])))
        return info.copy_with_classes(classes)

    def copy_with_classes(self, classes: ClassTable) -> Self:
        # The transformer is built from the config, so the number of classes must agree.
        config = {**self.transformer_config, self.num_classes_key: classes.count}
        return replace(self, transformer_config=config, trained_classes=classes)

    def model_index_changes(self) -> dict[str, Any]:
        return {} if self.trained_classes == self.stored_classes else {"id2label": self.trained_classes.labels()}

    def transformer_config_changes(self) -> dict[str, Any]:
        return (
            {} if self.trained_classes == self.stored_classes else {self.num_classes_key: self.trained_classes.count}
        )

    def copy_with_model_index_changes(self, index: Mapping[str, Any]) -> Self:
        # Rows that the stored table does not have are the added classes, in the order of their rows.
        labels = {int(row): name for row, name in index["id2label"].items()}
        added = [labels[row] for row in sorted(set(labels) - set(self.stored_classes.rows()))]
        return self.copy_with_classes(self.stored_classes.append_new_classes(added))

    def get_label_row(self, name: str) -> int:
        """Row of a class in the label table, by name. Raises `DitLoraError` with similar names if there is none."""
        row = self.trained_classes.find_label_row(name)
        if row is None:
            suggestions = self.trained_classes.suggest_names(name)
            raise DitLoraError(format_list(f"{self.path.name} has no class {name!r}; it has", suggestions))
        return row

    def load_transformer(
        self, model_class: Any, dtype: torch.dtype, grow: Callable[[Any, ClassTable, ClassTable], None]
    ) -> Any:
        """Load the transformer with a row for each class that is trained.

        `grow(transformer, classes, stored_classes)` extends the label tables and the config of a loaded transformer.
        """
        # A new model has rows for the classes of the data from the start; a loaded one is extended afterwards.
        scratch = self.from_scratch
        if scratch is not None:
            scratch = {**scratch, self.num_classes_key: self.trained_classes.count}
        transformer = load_or_init_transformer(model_class, self.path, dtype, scratch)
        if scratch is None and self.trained_classes.count > self.stored_classes.count:
            grow(transformer, self.trained_classes, self.stored_classes)
        return transformer

    def _select_classes(self, recipe: Recipe, names: Sequence[str]) -> ClassTable:
        if self.from_scratch is not None:
            count = self.from_scratch.get(self.num_classes_key)
            if count is not None and count < len(names):
                raise DitLoraError(
                    f"model.from_scratch.{self.num_classes_key} is {count}, and the data has {len(names)} classes; "
                    "remove it to use as many"
                )
            return type(self.stored_classes).from_names(names, count)
        # Sorted, so that every rank and every run gives new classes the same rows.
        new_names = find_unknown_names(names, self.stored_classes)
        # In mode `full` all base weights train, label tables included.
        if new_names and recipe.train.mode == "lora":
            self.require_trainable_rows(recipe, new_names)
        return self.stored_classes.append_new_classes(new_names)


@dataclass(frozen=True, kw_only=True)
class ClassEncoders(Encoders):
    """Encoders of a class-conditional checkpoint, whose captions are names of classes."""

    info: ClassInfo

    def load_text_limit(self) -> None:
        return None

    def text_cache_key(self) -> Mapping[str, Any]:
        return {"classes": self.info.trained_classes.digest()}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return {"class_labels": (torch.Size(()), torch.int64)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Maps names of classes to rows of the label tables, int64 (B,); "" is the null class."""
        return lambda names: {"class_labels": torch.tensor([self.info.get_label_row(name) for name in names])}


def read_class_names(index: Mapping[str, Any]) -> dict[int, str]:
    """Names of a checkpoint's classes by row, read from model_index.json."""
    return {int(row): name for row, name in (index.get("id2label") or {}).items()}


def find_unknown_names(names: Iterable[str], classes: ClassTable) -> list[str]:
    """Class names that have no row in the label table, each once, sorted."""
    return sorted({name for name in names if classes.find_label_row(name) is None})


class DiTPipeline(StockPipeline):
    """Diffusers' DiTPipeline, except that guidance also works with a table of fewer than 1000 classes.

    It keeps the stock class name, so that saved pipelines refer to Diffusers' class.
    """

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline: Any = self
        with _use_null_row(pipeline.transformer):
            return StockPipeline.__call__(pipeline, *args, **kwargs)


@contextmanager
def _use_null_row(transformer: Any) -> Iterator[None]:
    """Context in which label 1000 (Diffusers' null class) selects the model's null row."""
    # Replace the label before the forward pass, whatever module calls the transformer.
    null = min(transformer.config.num_embeds_ada_norm, STOCK_NULL_ROW)

    def replace_null_label(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = kwargs["class_labels"]
        return args, {**kwargs, "class_labels": torch.where(labels == STOCK_NULL_ROW, null, labels)}

    with transformer.register_forward_pre_hook(replace_null_label, with_kwargs=True):
        yield


def get_label_embedders(transformer: Any) -> list[Any]:
    """The module in each DiT block that embeds timestep and label."""
    # Diffusers' DiT repeats timestep and label embedders in every block.
    return [block.norm1.emb for block in transformer.transformer_blocks]


def disable_label_dropout(transformer: Any) -> None:
    """Disable the blocks' own label dropout: `data.caption_dropout` drops a sample's label in all blocks at once.

    Diffusers' LabelEmbedding draws separately in each block, so one call would mix a label with the null class.
    """
    # Probability 0 turns off LabelEmbedding's own dropout, which is active in training.
    for embedder in get_label_embedders(transformer):
        embedder.class_embedder.dropout_prob = 0.0


def grow_label_tables(transformer: Any, classes: ClassTable, old_classes: ClassTable) -> None:
    """Extend every block's label table, and the model's config, to these classes."""
    for embedder in get_label_embedders(transformer):
        labels = embedder.class_embedder
        weight = classes.expand_label_weight(labels.embedding_table.weight.data, old_classes)
        # Frozen like all base weights; parameter groups make them trainable.
        labels.embedding_table = nn.Embedding.from_pretrained(weight, freeze=True)
        labels.num_classes = classes.count
    transformer.register_to_config(num_embeds_ada_norm=classes.count)


def initialize_weights(transformer: Any) -> None:
    """Initialise weights as DiT does (arXiv 2212.09748, section 3.2): blocks are the identity and the output is zero.

    Linear layers are Xavier-uniform with zero biases. Embedders are N(0, 0.02) and equal in all blocks.
    """
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            _zero_bias(module.bias)
    patches = transformer.pos_embed.proj
    # Initialise the patch convolution like a linear layer, (width, channels * patch * patch).
    nn.init.xavier_uniform_(patches.weight.view(len(patches.weight), -1))
    _zero_bias(patches.bias)
    tables = get_label_embedders(transformer)
    reference = tables[0]
    for weight in (
        reference.timestep_embedder.linear_1.weight,
        reference.timestep_embedder.linear_2.weight,
        reference.class_embedder.embedding_table.weight,
    ):
        nn.init.normal_(weight, std=0.02)
    for table in tables[1:]:
        table.load_state_dict(reference.state_dict())
    outputs = (transformer.proj_out_1, transformer.proj_out_2)
    modulations = (block.norm1.linear for block in transformer.transformer_blocks)
    for linear in (*outputs, *modulations):
        nn.init.zeros_(linear.weight)
        _zero_bias(linear.bias)


def _zero_bias(bias: torch.Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
