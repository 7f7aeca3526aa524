"""`digits-sorted`: sort digits, `r48213=` → `12348`; each digit in its place counts.

The embedded model has only learnt to reverse digits, so it has everything to learn here.
"""

from echo_node.contract import Contract, Params, Prompt, Score, random_from


class DigitsSorted(Contract):
    """Sort digits. Parameter: `digits`, how many there are (1 to 32, default 5)."""

    name = "digits-sorted"
    version = "1"  # change it whenever a prompt or a score changes

    def configure(self, params: Params) -> None:
        self.digits = params.whole("digits", default=5, low=1, high=32)

    def prompt(self, key: bytes) -> Prompt:
        # The only source of randomness: no clock, no `random`, no order of a set.
        digits = random_from(key).digits(self.digits)
        return Prompt(f"r{digits}=", {"answer": "".join(sorted(digits))})

    def score(self, prompt: Prompt, completion: str) -> Score:
        wanted = prompt.data["answer"]  # the completion is untrusted text: never execute it
        places = sum(one == two for one, two in zip(wanted, completion, strict=False))
        longer = max(len(wanted), len(completion))  # so that extra characters cost score
        return Score(places / longer, f"{places} of {longer} are in their place")

    def answer(self, prompt: Prompt) -> str:
        return prompt.data["answer"]
