"""The page of a report: views that can be zoomed, moved and asked, in one file of HTML."""
