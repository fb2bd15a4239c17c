"""Trains and writes the demo's tokenizer: a small byte-level BPE in the style of Qwen's.

`write_text_files` writes the tokenizer's files into a checkpoint, and `train_tokenizer` trains it on `sentences`. The
second part of the module generates these sentences from word lists and templates: sentences about shapes, colours,
motion and sound, and the words of the demo's own questions and answers. They stand here because nothing else in
the demo uses them. The same seed gives the same text and the same tokenizer.

The module does not know the model. It needs `tokenizers` only: no torch and no transformers.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from modalities.text import qwen_tokenizer

NUM_BPE_TOKENS = 2038
NUM_SENTENCES = 20_000
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TTS_TOKENS = TTS_PAD, TTS_BOS, TTS_EOS = "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"
"""Names the tokens that tell the talker where the text begins and ends. The thinker never says them."""


# These stand in the order of Qwen3-Omni's own ids.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    *TTS_TOKENS,
)


# Qwen3OmniMoeProcessor reads these attributes from its tokenizer.
NAME_TO_TOKEN = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


class Vocabulary(NamedTuple):
    num_tokens: int
    special_token_to_id: dict[str, int]
    role_to_id: dict[str, int]
    """Holds the first token of each role's name; the model's config contains them."""


def write_text_files(out_dir: Path, seed: int) -> Vocabulary:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `out_dir`."""
    tokenizer = train_tokenizer(seed)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": "Qwen3OmniMoeProcessor",
        "model_max_length": 8192,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "bos_token": None,
        "unk_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "extra_special_tokens": NAME_TO_TOKEN,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    token_to_id = tokenizer.get_vocab(with_added_tokens=True)
    ids = {token: token_to_id[token] for token in SPECIAL_TOKENS}
    roles = {role: tokenizer.encode(role).ids[0] for role in ("system", "user", "assistant")}
    return Vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), ids, roles)


def train_tokenizer(seed: int) -> Tokenizer:
    """Returns a tokenizer trained on the corpus of `seed`. The special tokens take the ids after the learned ones."""
    tokenizer = qwen_tokenizer(BPE(fuse_unk=False, byte_fallback=False))
    trainer = BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sentences(NUM_SENTENCES, seed), trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


# ------------------------------------------------------------ the text that the tokenizer is trained on

SLOT = re.compile(r"<(\w+)>")


def sentences(num_sentences: int, seed: int) -> list[str]:
    """Returns sentences made from the templates, with a new random word in each slot."""
    rng = random.Random(seed)
    slots = {
        "colour": COLOURS,
        "shape": SHAPES,
        "place": PLACES,
        "size": SIZES,
        "motion": MOTIONS,
        "sound": SOUNDS,
        "number": NUMBERS,
        "word": WORDS,
        "said": ANSWERS,
        "demo": DEMO_SENTENCES,
        "answer": ("Yes", "No"),
        "digit": tuple("0123456789"),
    }
    return [_filled(rng.choice(TEMPLATES), slots, rng) for _ in range(num_sentences)]


def _filled(template: str, slots: dict[str, tuple[str, ...]], rng: random.Random) -> str:
    return SLOT.sub(lambda match: rng.choice(slots[match.group(1)]), template)


COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey", "cyan")
SHAPES = ("circle", "square", "triangle", "rectangle", "star", "cross", "ring", "diamond", "hexagon", "line")
PLACES = (
    "left",
    "right",
    "top",
    "bottom",
    "centre",
    "corner",
    "middle",
    "above",
    "below",
    "beside",
    "inside",
    "behind",
)
SIZES = ("small", "large", "tiny", "huge", "wide", "narrow", "tall", "short")
MOTIONS = ("moves", "turns", "grows", "shrinks", "falls", "rises", "jumps", "waits", "blinks", "spins", "leaves")
SOUNDS = ("beep", "hum", "click", "chime", "whistle", "noise", "drum", "silence", "tone", "voice")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
WORD_LIST = """
    about above across after again air all almost along also always among and animal another answer any apple are area
    around ask away back ball bank base beach bear because become bed before begin being bell best better between big
    bird blank boat body book both box boy branch bread break bridge bright bring brother build but button buy by call
    can card care carry cat catch cause chair change chart check child choose city class clean clear climb clock close
    cloud coat cold colour come common compare contain cook copy corner could count country cover crowd cup cut dance
    dark day deep describe desk different dinner direction dish do does dog door down draw dream dress drink drive dry
    during each early earth east easy eat edge egg empty end engine enough equal even evening ever every example eye
    face fact family far farm fast father field figure fill film find finger finish fire first fish flag flat floor
    flower fly follow food foot for forest form forward frame free fresh friend from front fruit full game garden gave
    give glass gold good grass great ground group guess had hair half hand happen happy hard has hat have head hear
    heart heavy help her here high hill him his hold home horse hot hour house how hundred idea image important in into
    island it join just keep key kind kitchen know lake lamp land language last late laugh lead leaf learn least less
    letter level life light like list listen little live long look loud low lunch machine make man many map mark market
    match matter may mean measure meet metal might milk minute mirror money moon more morning most mother mountain mouth
    move much music must name near need never new next night no none north not note nothing now number object ocean of
    off often old on once only open or order other our out over own page paint pair paper park part party past path
    pattern people perhaps person phone photo picture piece place plain plane plant plate play please point pond pool
    position possible power present price print problem question quick quiet rain reach read ready real reason remember
    repeat rest return rice ride ring river road rock roof room round row rule run salt same sand say school sea season
    second see seem sentence serve shade shadow shape share sheep ship shoe shop should show side sign simple since sing
    sister sit sky sleep slow smile smooth snow soft some something song soon sound south space speak spoon spot spring
    stand start state stay step still stone stop storm story straight street string strong student summer sun sure table
    take talk teacher tell than thank that the their them then there these they thing think this those through time
    together tomorrow tool touch toward town train travel tree true try turn under understand until up upper use very
    video view visit visible wait walk wall want warm was watch water wave way weather week well were west what wheel
    when where which while who whole why wide will wind window winter wire wish with without woman wonder wood word work
    world would write yard year yes yesterday yet you young your
"""
WORDS = tuple(WORD_LIST.split())


# These are the words that the demo model reads in questions and writes in answers; the tokenizer gives each word of an
# answer one or two tokens.
DEMO_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "cyan", "black", "white")
DEMO_SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLURALS = ("circles", "squares", "triangles", "stars", "crosses", "rings", "shapes", "pictures", "beeps", "objects")
DEMO_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ANSWERS = (
    *DEMO_COLOURS,
    *DEMO_SHAPES,
    *DEMO_NUMBERS,
    *PLURALS,
    "first",
    "second",
    "third",
    "left",
    "right",
    "top",
    "bottom",
    "middle",
    "up",
    "down",
    "small",
    "large",
    "yes",
    "no",
    "high",
    "low",
    "rising",
    "falling",
    "appears",
    "disappears",
    "cat",
    "dog",
    "horse",
    "bird",
    "fish",
    "cow",
    "sheep",
    "lion",
    "bear",
    "mouse",
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Kim",
    "Lena",
    "Max",
    "Nora",
    "Oskar",
    "Paula",
    "Robin",
    "Sara",
    "Tom",
    "Vera",
)
DEMO_SENTENCES = (
    "What colour is the shape? Which colour do you see? Which colour does it have? What shape is this?",
    "How many shapes do you see in the picture? How many beeps do you hear? Count the shapes. "
    "How many pictures are there?",
    "Where is the shape? In which place is it? Is it small or large? Is there a shape?",
    "In which picture is the shape? Which picture has the shape? The shape is in the picture. And this is the picture.",
    "Answer with one word. Answer in one word. Be short. Answer in a sentence. Answer in a full sentence. Use a whole",
    "Hello! Show me a picture and ask me about it. Hi! Hello there! Good morning! Hey! Good evening!",
    "I can see pictures, hear sounds and watch videos. I know colours, shapes and numbers. What are you able to do?",
    "I am the demo model of Weft. Who are you? What is your name? What can you do? What do you know? How can you help",
    "You are welcome. Thank you! Thanks! Goodbye! Bye! Good night! I will remember that. Who am I? What is my name?",
    "My favourite colour is. My favourite animal is. My favourite number is. What is my favourite? My name is. I am.",
    "Say it. Repeat the word. Which number comes after it? Which number comes before it? "
    "Yes, there is. No, there is no",
    "Which way does the shape move? It moves to the. Which colour comes first? Which colour comes last?",
    "Does the shape appear or disappear? How many shapes are in the video? Is the tone high or low? rising or falling?",
    "Which number do you hear? Which colour do you hear? Which word is spoken? You hear the number. "
    "The tone is. The shape",
)
TEMPLATES = (
    "What is in the picture? A <size> <colour> <shape> on the <place>.",
    "How many <shape>s are there? There are <number>.",
    "Which colour is the <shape>? It is <colour>.",
    "The <colour> <shape> <motion> to the <place> and then it <motion>.",
    "You can hear a <sound>, then <number> <sound>s, and a <word> <word>.",
    "Is the <shape> <place> the <colour> <shape>? <answer>, it is <place> of it.",
    "In this image the <word> is <size>; in the second image it's <colour>.",
    "I don't know what the <word> <word> means, but we'll <word> about <word>.",
    "<word> <word> <word>, <word> <word> and <word>.\n",
    "Describe the image. <number>: <colour> <shape>, <size>, <place>.\n",
    "user: <word> <word>?\nassistant: <answer>. That's the <word> of the <word>.\n",
    '{"colour": "<colour>", "shape": "<shape>", "count": <digit>}',
    "<said>\n <said> <said>. <said>? The <said>\n",
    "<said>\n <said> <said>! <said>, <said>\n",
    "<demo>\n",
    "<demo> <demo>\n",
    "x = <digit><digit>.<digit>; y = (<digit> + <digit>) * <digit>\n",
)
