"""The job's energy bill: sums of the lines of its nodes, as tables, sentences and files."""
