"""What every report is made of: tables for the terminal, CSV, pictures, and pages of HTML."""
