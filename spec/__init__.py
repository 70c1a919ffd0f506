"""The lifecycle of KV memory as data: tables, their coupling, and the laws."""
