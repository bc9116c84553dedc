"""The demonstration: one long document, several questions, three processes."""
