# SPDX-License-Identifier: Apache-2.0
"""What a language model is asked while a draft model learns from its answers.

The kinds are those of the FLy benchmark (fly_prompts.json); a test holds that none of its prompts is here.
"""

import random
from itertools import product

_TOPICS = (
    "rivers", "volcanoes", "bread", "bicycles", "bees", "the Moon", "magnets", "trains", "clouds", "chess",
    "whales", "paper", "glass", "winter", "gardens", "lighthouses", "earthquakes", "maps", "music", "clocks",
    "spiders", "deserts", "bridges", "coffee", "sleep", "robots", "electric motors", "the ocean", "wood", "cats",
    "steam engines", "rain", "mountains", "libraries", "telescopes", "soil", "kites", "wheels", "batteries", "ice",
)  # fmt: skip
_ABOUT = (
    "What are {} good for?",
    "Explain in simple words how {} work or come to be.",
    "Write a short paragraph about {}.",
    "List five facts about {}.",
    "Write two sentences about {}.",
    "Name three things that have to do with {}, as a numbered list.",
    "Write the beginning of a story about {}.",
)
_FUNCTIONS = (
    "adds two numbers", "returns the largest number of a list", "counts the vowels of a word",
    "says whether a number is even", "sorts a list of words by length", "computes the area of a circle",
    "removes spaces from a string", "sums the digits of a number", "returns the last element of a list",
    "says whether a word is a palindrome", "turns Celsius into Fahrenheit", "finds the smallest of three numbers",
    "joins a list of words with commas", "computes a factorial", "prints the squares of the numbers up to n",
    "counts how often a letter occurs", "returns the average of a list", "swaps two elements of a list",
)  # fmt: skip
_DEFINITIONS = (
    "add(a, b)", "largest(numbers)", "count_vowels(word)", "is_even(n)", "circle_area(radius)", "average(values)",
    "last(items)", "factorial(n)", "squares(n)", "fahrenheit(celsius)", "join_words(words)", "digits(n)",
)  # fmt: skip
_WHO = ("The old gardener", "A young engineer", "My neighbour", "The little dog", "The captain", "Our teacher")
_DOES = (
    "walks along the river every morning and feeds the ducks",
    "has built a small boat and wants to sail to the island",
    "looks for the lost key in the kitchen and finds a letter",
    "reads a long book about stars while the rain falls on the roof",
    "carries a heavy box up the stairs and puts it on the table",
)
_REWRITE = (
    "Rewrite this in the past tense: {}.",
    "Say this in other words: {}.",
    "Summarise in a few words: {}.",
    "Repeat this sentence twice: {}.",
)


def seeds(rng_seed: int) -> list[str]:
    """Prompts as they go into the tokenizer, each once, in an order that the seed decides."""
    asked = [form.format(topic) for form, topic in product(_ABOUT, _TOPICS)]
    asked += [f"Write a Python function that {what}." for what in _FUNCTIONS]
    asked += [f"Count from {first} to {first + 15}." for first in range(2, 60, 3)]
    asked += [f"What is {a} plus {b}?" for a, b in product(range(3, 15, 2), range(2, 20, 4))]
    asked += [form.format(f"{who} {does}") for form, who, does in product(_REWRITE, _WHO, _DOES)]
    plain = [f"def {definition}:\n    " for definition in _DEFINITIONS]
    plain += [
        f"{', '.join(str(first + i * step) for i in range(6))}," for first, step in product(range(11, 80, 7), (1, 3, 5))
    ]
    found = [*map(chat, asked), *plain]
    random.Random(rng_seed).shuffle(found)
    return found


def chat(question: str) -> str:
    """A question in SmolLM2's chat format, without a system turn, up to where its answer begins."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
