"""From captured hops to explained calls: prediction, reasons, native names, findings."""
