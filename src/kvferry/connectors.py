"""Gone; see `kvferry.moved`."""

from kvferry.moved import moved

raise moved(__name__)
