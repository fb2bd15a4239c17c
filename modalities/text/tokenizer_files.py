"""Reads a checkpoint's files for text: its tokenizer, its chat template, the names of its special tokens, and its
end-of-turn ids.

The tokenizer is a `tokenizers.Tokenizer`, built from tokenizer.json, from Qwen's vocab.json and merges.txt, or from
SentencePiece's tokenizer.model. The chat template is returned as source, and this module knows nothing of Jinja. Each
function raises ConfigError for a file that can't be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fabric.contracts import ConfigError
from modalities.checkpoint_files import read_json_if_present
from modalities.text.sentencepiece_model import piece_decoder, read_sentencepiece
from modalities.text.token_decoding import decoding_of


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Loads the tokenizer as transformers does, and switches off truncation and padding, which a file may ask for.
    Raises ConfigError if it can't be loaded."""
    config = read_json_if_present(model_dir / "tokenizer_config.json")
    try:
        tokenizer = _from_files(model_dir, config)
        if _is_rebuilt_as_llama(model_dir, config, tokenizer):
            tokenizer = _rebuilt_as_llama(tokenizer, config)
    except ConfigError as error:
        raise ConfigError(f"{model_dir.name}: {error}") from error
    except Exception as error:  # The library `tokenizers` raises Exception itself, nothing narrower.
        raise ConfigError(f"{model_dir.name}: the tokenizer can't be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_files(model_dir: Path, config: Mapping[str, object]) -> Tokenizer:
    """Builds the tokenizer from the first of tokenizer.json, Qwen's vocab.json and tokenizer.model that can be used.
    Raises ConfigError if there is none."""
    file, sentencepiece = model_dir / "tokenizer.json", model_dir / "tokenizer.model"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    if config.get("tokenizer_class") in QWEN_CLASSES:
        model = BPE.from_file(str(model_dir / "vocab.json"), str(model_dir / "merges.txt"))
        return _with_added_tokens(qwen_tokenizer(model), config)
    if sentencepiece.is_file():
        tokenizer = _with_added_tokens(read_sentencepiece(sentencepiece).tokenizer(), config)
        tokenizer.post_processor = _post_processor(tokenizer, config, special_token_names(model_dir))
        return tokenizer
    raise ConfigError(
        f"there is neither a tokenizer.json nor a tokenizer.model, and without them tokenizer_class must be one of "
        f"{', '.join(QWEN_CLASSES)}, not {config.get('tokenizer_class')!r}"
    )


def _with_added_tokens(tokenizer: Tokenizer, config: Mapping[str, object]) -> Tokenizer:
    """Adds the tokens of tokenizer_config.json. Raises ConfigError if one gets another id than it must have."""
    added = config.get("added_tokens_decoder")
    for token_id, entry in sorted((added if isinstance(added, Mapping) else {}).items(), key=lambda item: int(item[0])):
        tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in ADDED_TOKEN_FIELDS if key in entry})])
        if (found := tokenizer.token_to_id(entry["content"])) != int(token_id):
            raise ConfigError(f"the token {entry['content']} must have the id {token_id}, but it has {found}")
    return tokenizer


def _post_processor(
    tokenizer: Tokenizer, config: Mapping[str, object], names: Mapping[str, str]
) -> processors.TemplateProcessing:
    """Returns what tokenizer_config.json says about the beginning and the end of a raw prompt. SentencePiece's
    tokenizers write a beginning-of-sequence token unless the file says otherwise. With a tokenizer.json, the
    post-processor of that file counts instead, as in transformers."""
    added = []
    for kind, default in (("bos", True), ("eos", False)):
        token = names.get(f"{kind}_token", "") if config.get(f"add_{kind}_token", default) else ""
        token_id = tokenizer.token_to_id(token)
        added.append(None if token_id is None else (token, token_id))
    before, after = ([] if entry is None else [entry[0]] for entry in added)
    special = [entry for entry in added if entry is not None]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


# ------------------------------------------------------------ Llama's tokenizer

LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
CODE_LLAMA_CLASSES = ("CodeLlamaTokenizer", "CodeLlamaTokenizerFast")
# For these types of models, transformers 5.23 takes tokenizer.json as it is
# (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` in transformers/models/auto/tokenization_auto.py, and the rows of
# `TOKENIZER_MAPPING_NAMES` there that name no class of their own).
TYPES_AS_THE_FILE_SAYS = frozenset(
    {"internlm2", "internlm3", "jamba", "llava", "llava_next", "mistral", "mixtral", "phi3", "vipllava"}
)


def _is_rebuilt_as_llama(model_dir: Path, config: Mapping[str, object], tokenizer: Tokenizer) -> bool:
    """Returns true if transformers ignores the normaliser, pre-tokenizer and decoder of the file, because the class of
    the tokenizer is Llama's. Byte-level tokenizers (Llama 3) stay as they are."""
    if config.get("tokenizer_class") not in (*LLAMA_CLASSES, *CODE_LLAMA_CLASSES):
        return False
    if not isinstance(tokenizer.model, BPE) or decoding_of(tokenizer).is_byte_level:
        return False
    return read_json_if_present(model_dir / "config.json").get("model_type") not in TYPES_AS_THE_FILE_SAYS


def _rebuilt_as_llama(tokenizer: Tokenizer, config: Mapping[str, object]) -> Tokenizer:
    """Returns the tokenizer that `LlamaTokenizer` or `CodeLlamaTokenizer` of transformers 5.23 makes of the vocabulary.

    With `legacy`, which Code Llama does not know, a "▁" stands at the start of the text and after each control token;
    otherwise, which is the default since version 5, only at the start."""
    has_prefix = config.get("add_prefix_space") is not False
    is_legacy = bool(config.get("legacy")) and config.get("tokenizer_class") in LLAMA_CLASSES
    scheme = ("always" if is_legacy else "first") if has_prefix else "never"
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = piece_decoder(has_prefix)
    # The added tokens were prepared with the former normaliser, so that only a new tokenizer finds them as written.
    return Tokenizer.from_str(tokenizer.to_str())


# ------------------------------------------------------------ Qwen's tokenizer

QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# This is PRETOKENIZE_REGEX of transformers/models/qwen2/tokenization_qwen2.py.
QWEN_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def qwen_tokenizer(model: BPE) -> Tokenizer:
    """Returns a tokenizer with Qwen's normaliser, pre-tokenizer and decoder around a BPE model."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT_PATTERN), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ------------------------------------------------------------ the settings


def chat_template(model_dir: Path) -> str:
    """Returns the chat template. It comes from the first of chat_template.jinja, chat_template.json and
    tokenizer_config.json that contains one. It is empty for a base checkpoint, which has none."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json_if_present(model_dir / name).get("chat_template")
        if isinstance(template, list):  # An older form is a list of named templates.
            template = {named["name"]: named["template"] for named in template}.get("default")
        if isinstance(template, str):
            return template
    return ""


def has_processor(model_dir: Path) -> bool:
    """Returns true for the directory of a model that takes media. In transformers, its conversations are tokenised by a
    processor, which adds the beginning-of-sequence token if the template has not written it (LLaVA-1.5); the
    conversations of other models are not changed."""
    return any((model_dir / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def special_token_names(model_dir: Path) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json: a mapping from names such as `eos_token` to their texts."""
    config = read_json_if_present(model_dir / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, Mapping) else {})}
    names = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Returns the end-of-turn ids without repeats. They come from generation_config.json or else from config.json (its
    top level, then the text model's part)."""
    config = read_json_if_present(model_dir / "config.json")
    for source in (read_json_if_present(model_dir / "generation_config.json"), config, *_text_configs(config)):
        ids = source.get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids and all(isinstance(item, int) for item in ids):
            return tuple(dict.fromkeys(ids))
    raise ConfigError(f"{model_dir.name}: neither generation_config.json nor config.json has an eos_token_id")


def _text_configs(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    thinker = config.get("thinker_config")
    owners = [config, *([thinker] if isinstance(thinker, Mapping) else [])]
    return [text for owner in owners if isinstance(text := owner.get("text_config"), Mapping)]
