"""From a listing to verified bytes in every rank: lineage, vote, quarantine, verification."""
