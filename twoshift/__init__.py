"""Keep a deployed classifier accurate when appearance and class frequencies shift at once."""

__version__ = "0.1.0"
