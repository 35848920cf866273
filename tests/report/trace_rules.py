"""The rules of the Trace Event Format, as far as our traces use it."""

from collections import defaultdict


def check_format(events):
    """What viewers ask of events: their fields, and slices of a thread one behind another."""
    ends = defaultdict(int)
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys(), event
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["args"]
        elif event["ph"] == "C":
            assert type(event["ts"]) is int
            assert all(type(value) in (int, float) for value in event["args"].values())
        else:
            assert event["ph"] == "X"
            assert min(event["ts"], event["dur"]) >= 0
            thread = event["pid"], event["tid"]
            assert event["ts"] >= ends[thread], event
            ends[thread] = event["ts"] + event["dur"]
