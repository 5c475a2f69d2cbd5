"""The commands of `pipeline`, by what they are for. Each imports what it needs when it runs."""
