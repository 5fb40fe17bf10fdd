"""Problems and conversations: read from sources, generated, filtered, decontaminated, written as JSONL."""
