"""The lifecycle of KV-cache memory in LLM engines, as explicit transition tables."""
