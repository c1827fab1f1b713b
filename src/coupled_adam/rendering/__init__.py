"""The building blocks of reports: tables for the terminal, CSV, pictures, and pages of HTML."""
