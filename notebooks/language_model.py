# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A language model that speaks
#
# A small language model learns the sentences of a grammar, continues texts, and is judged by perplexity and by its
# grammar, under two residual schemes. The text is made on the spot (`pip install ".[notebooks]"` in the checkout brings
# what this needs).

# %%
import random
import re
import tempfile
from pathlib import Path

from IPython.display import Image, display

import normformer_rs as nfrs

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The grammar
#
# A verb agrees with the sentence's first noun. Nouns in between, which may have another number, lead astray.

# %%
NOUNS = {"dog": "dogs", "horse": "horses", "painter": "painters", "river": "rivers", "teacher": "teachers"}
VERBS = {"sees": "see", "follows": "follow", "remembers": "remember", "paints": "paint"}
ADJECTIVES = ("old", "quiet", "green", "clever")
generator = random.Random(1)


def phrase(is_plural):
    noun = generator.choice([*NOUNS.items()])[is_plural]
    return " ".join(["the", *generator.sample(ADJECTIVES, generator.choice([0, 0, 1, 2])), noun])


def sentence():
    is_plural, chance = generator.random() < 0.5, generator.random
    between = [f"near {phrase(chance() < 0.5)}" for _ in range(generator.choice([0, 1, 1, 2]))]
    return " ".join(
        [phrase(is_plural), *between, generator.choice([*VERBS.items()])[is_plural], phrase(chance() < 0.5)]
    )


def is_grammatical(text):
    noun, verb = "|".join([*NOUNS, *NOUNS.values()]), "|".join([*VERBS, *VERBS.values()])
    one = rf"the (?:(?:{'|'.join(ADJECTIVES)}) )*({noun})"
    found = re.fullmatch(rf"{one}(?: near {one})*? ({verb}) {one}", text)
    return found is not None and (found[1] in NOUNS) == (found[3] in VERBS)


texts = {"train": [sentence() for _ in range(6000)], "valid": [sentence() for _ in range(300)]}
assert all(map(is_grammatical, texts["valid"]))
for part, lines in texts.items():
    (folder / part).write_text("\n".join(lines) + "\n")
print(*texts["valid"][:3], sep="\n")

# %% [markdown]
# ## Training
#
# The same model with two schemes, without warm-up. Words are cut into pieces by 60 BPE merges. In the curves look at
# which of the two begins to learn first.

# %%
shape = {"architecture": "decoder-only", "d_model": 64, "d_ff": 128, "heads": 4, "decoder_layers": 6, "dropout": 0.1}
training = nfrs.TrainingConfig(
    updates=250, max_tokens=2000, schedule="constant", lr=2e-3, warmup=0, evaluate_every=50, keep=1, label_smoothing=0.0
)
data = nfrs.DataConfig(
    train_target=folder / "train", valid_target=folder / "valid", bpe_operations=60, segment_length=64
)
runs = {}
for scheme in ("prenorm", "postnorm"):
    model = nfrs.TransformerConfig(**shape, norm="rmsnorm", residual=scheme)
    runs[scheme] = nfrs.Trainer(model, training, data).fit(folder / scheme, curves=False)

# %%
display(Image(filename=str(nfrs.plot(*runs.values(), path=folder / "runs.png"))))

# %% [markdown]
# prenorm is ahead at every evaluation. At six layers postnorm learns without warm-up, too, behind it.
#
# ## Speaking
#
# `on_text` hears the text while it is made; a word may come in several parts. From a terminal:
# `normformer-rs generate --model DIR --prompt "the old painters"`.

# %% tags=["nbval-ignore-output"]
prompt = "the old painters near the river"
print(prompt, end="")
parts = []
nfrs.generate(folder / "prenorm", [prompt], on_text=lambda prompt, sample, text: parts.append(text or ""))
print("".join(parts))
print("it came as", [part for part in parts if part])

# %% [markdown]
# Several texts of a prompt, at three temperatures, and from the nucleus of 0.9.

# %% tags=["nbval-ignore-output"]
for options in ({"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9}):
    (found,) = nfrs.generate(
        folder / "prenorm", ["the dog"], nfrs.GenerationConfig(samples=3, max_length=60, **options)
    )
    print(options)
    for made in found:
        print(f"   the dog{made.text}   (log p {made.log_probability:.1f})")

# %% [markdown]
# ## Two schemes
#
# Perplexity of the held-out text, with a window that gives each token at least 48 tokens of context; and how many of
# 300 new sentences follow the grammar.

# %%
for scheme in runs:
    measured = nfrs.evaluate_windows(folder / scheme, folder / "valid", stride=16)
    (made,) = nfrs.generate(folder / scheme, [""], nfrs.GenerationConfig(samples=300, max_length=80))
    right = sum(is_grammatical(text.text) for text in made)
    print(f"{scheme:9} perplexity per word {measured.word_perplexity:.2f}, grammatical {right / 3:.0f}%")
