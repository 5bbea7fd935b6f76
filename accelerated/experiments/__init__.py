"""The papers' tables and what a memory can hold, each measured by one command."""
