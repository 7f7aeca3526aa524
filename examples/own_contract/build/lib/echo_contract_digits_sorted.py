"""`digits-sorted`: say some digits in order, `r48213=` → `12348`. Each digit in its place counts.

The embedded model has only learnt to say digits backwards, so it has everything to learn here.
"""

from echo_node.contract import Contract, Params, Prompt, Score, random_from


class DigitsSorted(Contract):
    """Parameters: `digits`, how many there are to put in order (1 to 32, 5 unless given)."""

    name = "digits-sorted"
    version = "1"  # another prompt or score for the same input is another version

    def configure(self, params: Params) -> None:
        self.digits = params.whole("digits", default=5, low=1, high=32)

    def prompt(self, key: bytes) -> Prompt:
        digits = random_from(key).digits(
            self.digits
        )  # the only luck there is: no clock, no random, no set order
        return Prompt(f"r{digits}=", {"answer": "".join(sorted(digits))})

    def score(self, prompt: Prompt, completion: str) -> Score:
        wanted = prompt.data["answer"]  # and the completion is a stranger's text: compare it, never run it
        places = sum(one == two for one, two in zip(wanted, completion, strict=False))
        longer = max(len(wanted), len(completion))  # so that going on for ever earns nothing
        return Score(places / longer, f"{places} of {longer} are in their place")

    def answer(self, prompt: Prompt) -> str:
        return prompt.data["answer"]
