"""The paper's claims, the published tables, and the pages made from the records in ``results/``."""
