"""The same step at the cost of the touched rows."""
