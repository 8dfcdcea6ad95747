"""The tokenizer against transformers', on the default model and on vocabularies made here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from layby.errors import InvalidRequestError, ModelError
from layby.models import ModelFiles
from layby.models.gguf_file import GgufFile
from layby.models.tokenizer import Tokenizer

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "I'm sure they'll say we've won, isn't it? IT'S",
    "In 1984, 3.14159 and 1,000,000 were ²numbers½ ٣٤ 12",
    "naïve café Ünïcödé Ελληνικά русский עברית العربية हिन्दी",
    "你好，世界。今日は良い天気ですね。한국어",
    "emoji 🎉🎊 👩‍👩‍👧‍👦 🇫🇷 é é",
    "a  b   c    d\t\te\n\n\nf\r\n g \n  h   ",
    "def f(x: int) -> str:\n    return f'{x!r}' + \"\\n\"  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>text<|im_end|>",
    "▁under▁score <0x0A> <s> </s>",
    "x" * 300 + " " * 50,
]


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What a stream of bytes adds up to."""
    raw = b"".join(tokenizer.token_bytes(token) for token in ids)
    if tokenizer.strips_leading_space:
        raw = raw.removeprefix(b" ")
    return raw.decode("utf-8", errors="replace")


# --- The default model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: GgufFile) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_gguf)


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_files: ModelFiles) -> Any:
    """transformers' reading of the same file.

    It does not know the ``smollm`` pre-tokenizer, so the published one is put in: every digit on
    its own, then GPT-2's rule.
    """
    path = smollm2_files.path
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return oracle


def test_the_default_tokenizer_equals_transformers(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    for text in TEXTS:
        ids = smollm2_oracle(text)["input_ids"]
        assert smollm2.encode(text) == ids, text
        for skip in (True, False):
            expected = smollm2_oracle.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert smollm2.decode(ids, skip_special_tokens=skip) == expected, text


def test_decoding_undoes_encoding_on_the_default_model(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_streamed_bytes_add_up_to_decode(smollm2: Tokenizer) -> None:
    """Also where a cut leaves half a character, and for ids in no sensible order."""
    for text in TEXTS:
        ids = smollm2.encode(text)
        for end in range(len(ids)):
            assert joined(smollm2, ids[:end]) == smollm2.decode(ids[:end])
    scrambled = list(range(0, smollm2.vocab_size, 97))
    assert joined(smollm2, scrambled) == smollm2.decode(scrambled)


def test_every_byte_of_an_emoji_is_accounted_for(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🎉")
    assert len(ids) > 1
    assert b"".join(map(smollm2.token_bytes, ids)) == "🎉".encode()
    assert "\ufffd" in smollm2.token_text(ids[0])


def test_digits_are_single_tokens_on_the_default_model(smollm2: Tokenizer) -> None:
    """The model was trained so; runs of digits would be tokens it has hardly seen."""
    texts = [smollm2.token_text(token) for token in smollm2.encode("20 1984")]
    assert texts == ["2", "0", " ", "1", "9", "8", "4"]


def test_the_special_tokens_of_the_default_model(smollm2: Tokenizer) -> None:
    """Text says <|im_end|>, the file names only it as end; <|endoftext|> ends a text as well."""
    end, text_end = smollm2.id_of("<|im_end|>"), smollm2.id_of("<|endoftext|>")
    assert (text_end, end) == (0, 2)
    assert smollm2.eos_ids == {0, 2}
    assert smollm2.bos_id == 1
    assert smollm2.vocab_size == 49152
    assert smollm2.is_special(2)
    assert not smollm2.is_special(smollm2.encode("a")[0])
    assert smollm2.token_bytes(2) == b""
    assert smollm2.token_bytes(2, include_special=True) == b"<|im_end|>"
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.id_of("no such token") is None


def test_special_tokens_in_a_text_can_be_read_as_plain_text(smollm2: Tokenizer) -> None:
    text = "say <|im_end|> now"
    assert 2 in smollm2.encode(text)
    plain = smollm2.encode(text, parse_special=False)
    assert 2 not in plain
    assert smollm2.decode(plain) == text
    assert 2 in smollm2.encode(text)


def test_ids_that_no_token_has_add_nothing(smollm2: Tokenizer) -> None:
    """Embeddings are often padded, and a sampler may draw from the padding."""
    assert smollm2.token_bytes(49152) == b""
    assert smollm2.token_text(10**6) == ""
    assert smollm2.token_bytes(-1) == b""


def test_a_lone_surrogate_is_the_requests_fault(smollm2: Tokenizer) -> None:
    """JSON can carry one; it must not end in an error of the server."""
    with pytest.raises(InvalidRequestError, match="surrogate at character 1"):
        smollm2.encode("a\ud800")


# --- tokenizer.json ------------------------------------------------------------------------------

CORPUS = [text for text in TEXTS if "<" not in text] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: ▁ for space, one in front, bytes for what is unknown."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    # Words, or the trainer would merge across the spaces of a whole text.
    tokenizer.train_from_iterator([w for text in CORPUS for w in text.split()], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def metaspace() -> tokenizers.Tokenizer:
    """As newer Llama-style files: the space is put in front by the pre-tokenizer."""
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def save(directory: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Any:
    """Write the files and return transformers' tokenizer for them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like, metaspace])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}])
def test_tokenizer_json_equals_transformers(
    tmp_path: Path,
    make: Callable[[], tokenizers.Tokenizer],
    around: bool,
    config: dict[str, Any],
) -> None:
    """Also where the configuration and tokenizer.json disagree about BOS."""
    backend = make()
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    oracle = save(tmp_path, backend, **config)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        ids = oracle(text)["input_ids"]
        assert tokenizer.encode(text) == ids, text
        assert (
            tokenizer.encode(text, add_special_tokens=False)
            == (oracle(text, add_special_tokens=False)["input_ids"])
        )
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == (
                oracle.decode(ids, skip_special_tokens=skip)
            ), text
        assert joined(tokenizer, ids) == tokenizer.decode(ids)
    assert around == (tokenizer.encode("a")[0] == tokenizer.bos_id)


def test_added_tokens_keep_their_text_unless_they_are_special(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("  é", special=False)])
    save(tmp_path, backend)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ("<tool>", "  é"):
        token = tokenizer.id_of(text)
        assert token is not None
        assert tokenizer.encode(text) == [token]
        assert tokenizer.token_bytes(token) == text.encode()
        assert not tokenizer.is_special(token)
        assert tokenizer.vocab_size > token


def test_end_tokens_are_gathered_from_every_file(tmp_path: Path) -> None:
    """Models scatter them; missing one lets the answer run on into the next turn."""
    save(tmp_path, byte_level())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 50}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [60, 61]}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == {50, 60, 61, 2, 3}
    assert tokenizer.bos_id == 1


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    entry = {"content": "<|extra|>", "special": True, "normalized": False}
    save(tmp_path, backend, added_tokens_decoder={str(size): entry})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a<|extra|>")[-1] == size
    assert tokenizer.is_special(size)


def test_a_directory_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        Tokenizer.from_directory(tmp_path)


def test_a_decoder_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    """Its bytes per token would be guesses."""
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    save(tmp_path, backend)
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_directory(tmp_path)


# --- GGUF vocabularies ---------------------------------------------------------------------------


def write_vocabulary(path: Path, backend: tokenizers.Tokenizer, **fields: Any) -> GgufFile:
    """The vocabulary of a tokenizer as a converter would write it."""
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = gguf.TokenType
    types = [
        kinds.UNKNOWN
        if token == "<unk>"
        else kinds.CONTROL
        if token in SPECIAL
        else kinds.BYTE
        if token.startswith("<0x")
        else kinds.NORMAL
        for token in tokens
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(fields.get("model", "gpt2"))
    if "pre" in fields:
        writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "scores" in fields:
        writer.add_token_scores([fields["scores"](token) for token in tokens])
    else:
        merges = json.loads(backend.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def test_scores_give_the_same_tokens_as_merges(tmp_path: Path) -> None:
    """A llama vocabulary holds no merges, only scores; the merges follow from them."""
    backend = sentencepiece_like()
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    rank = {left + right: -float(index) for index, (left, right) in enumerate(merges)}
    file = write_vocabulary(
        tmp_path / "v.gguf", backend, model="llama", scores=lambda t: rank.get(t, -1e6)
    )
    tokenizer = Tokenizer.from_gguf(file)
    for text in TEXTS:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(expected) == backend.decode(expected)
    assert tokenizer.strips_leading_space
    assert tokenizer.eos_ids == {2, 3}


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", " O", "'", "K", "!!", "\n\n "]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'", "K", "!!", "\n\n "]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " O", "'K", "!!\n\n", " "]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'K", "!!\n\n", " "]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'K", "!!\n\n", " "]),
    ],
)
def test_each_pre_tokenizer_cuts_text_its_own_way(
    tmp_path: Path, pre: str, words: list[str]
) -> None:
    """With every such word a token of the vocabulary, the tokens are the words."""
    table = byte_level()
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {alphabet.pre_tokenize_str(word)[0][0] for word in words}
    vocabulary = dict.fromkeys([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(spelled):
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
            vocabulary[word[:end]] = None
    table = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=list(merges))
    )
    tokenizer = Tokenizer.from_gguf(write_vocabulary(tmp_path / "v.gguf", table, pre=pre))
    ids = tokenizer.encode("It's 12345 O'K!!\n\n ", add_special_tokens=False)
    assert [tokenizer.token_text(token) for token in ids] == words


@pytest.mark.parametrize(("pre", "bos"), [("gpt-2", []), ("llama-bpe", [1]), ("qwen2", [])])
def test_bos_is_added_where_models_of_the_kind_want_it(
    tmp_path: Path, pre: str, bos: list[int]
) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", byte_level(), pre=pre)
    assert Tokenizer.from_gguf(file).encode("") == bos


@pytest.mark.parametrize("fields", [{"pre": "martian"}, {"model": "bert"}])
def test_an_unknown_vocabulary_is_refused_by_name(tmp_path: Path, fields: dict[str, str]) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", byte_level(), **fields)
    with pytest.raises(ModelError, match=next(iter(fields.values()))):
        Tokenizer.from_gguf(file)


# --- Long texts and several threads --------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """A token per byte, one of 5 bytes, and a special one of 7."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return Tokenizer(backend, bos_id=None, eos_ids=())


def test_a_long_text_has_the_tokens_of_its_parts() -> None:
    """Long texts take another way through the library."""
    tokenizer = byte_tokenizer()
    part = "hello wörld 🎉<|end|>"
    assert tokenizer.encode(part * 2000) == tokenizer.encode(part) * 2000


def test_the_longest_token_is_known_so_that_a_text_can_be_too_long() -> None:
    assert byte_tokenizer().longest_token_bytes == len("<|end|>")


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """A lock, and the GIL, kept the event loop waiting: 2 MB of text for 5 s."""
    tokenizer = byte_tokenizer()
    done = threading.Event()

    def encode() -> None:
        tokenizer.encode("hello wörld " * 100_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    short_texts = 0
    while not done.is_set():
        assert tokenizer.encode("<|end|>") == [260]
        assert len(tokenizer.encode("<|end|>", parse_special=False)) == 7
        short_texts += 1
    thread.join()
    assert short_texts > 100
