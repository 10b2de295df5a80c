"""Batch scoring: plan, tasks, outputs, receipts, readers."""
