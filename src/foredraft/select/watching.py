"""Scoring guesses that were not used: a certain guess is right where the text turns out to say so, at no model cost."""

from dataclasses import dataclass

from foredraft.select.controller import Controller


@dataclass(slots=True)
class Watched:
    """A guess behind `start` answer tokens.

    Attributes:
        guess: Its tokens; fewer than `asked` where the drafter had no more.
        matched: How many of them the text has confirmed so far.
    """

    drafter: int
    situation: int
    start: int
    asked: int
    guess: tuple[int, ...]
    matched: int = 0


class Watching:
    """Guesses on one text that are not settled yet. Each counts once the text has shown what it was worth."""

    def __init__(self) -> None:
        self._open: list[Watched] = []

    def add(self, guess: Watched) -> None:
        self._open.append(guess)

    def settle(self, answer: list[int], controller: Controller) -> None:
        """Tell the controller what every guess was worth of which `answer` shows it."""
        still = []
        for one in self._open:
            offered = len(one.guess)
            while (at := one.start + one.matched) < len(answer) and one.matched < offered:
                if answer[at] != one.guess[one.matched]:
                    break
                one.matched += 1
            if one.matched == offered or at < len(answer):
                controller.seen(one.situation, one.drafter, one.asked, offered, one.matched)
            else:
                still.append(one)
        self._open = still

    def end(self, controller: Controller) -> None:
        """Count the rest as far as the text went: no more of a guess was asked than it could show."""
        for one in self._open:
            if one.matched:
                controller.seen(one.situation, one.drafter, one.matched, one.matched, one.matched)
        self._open = []
