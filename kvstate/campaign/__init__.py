"""Campaigns: drawing calls, playing them on a manager and a device, checking, and shrinking."""
