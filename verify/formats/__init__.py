"""Signed formats that cross the trust boundary: lease, submission, verdict, batch manifest."""
