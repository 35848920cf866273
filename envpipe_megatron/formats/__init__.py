"""Files that others read or write: energy logs, timelines, frontiers, other tools' profiles."""
