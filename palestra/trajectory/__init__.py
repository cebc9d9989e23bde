"""From recorded calls to the token rows that a trainer takes."""

from palestra.trajectory.final import calls_of_final_answers
from palestra.trajectory.rows import TokenRow, rows_of, rows_of_trie
from palestra.trajectory.trie import Node, TokenTrie

__all__ = ["Node", "TokenRow", "TokenTrie", "calls_of_final_answers", "rows_of", "rows_of_trie"]
